"""The perceptron of a block in one step: two equivariant linear maps with GELU through the regular domain between."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quickvit.group import DihedralGroup
from quickvit.ops.backend import fused, needs_grad
from quickvit.ops.cpu.linear import mlp_forward


def takes_mlp(x: Tensor, group: DihedralGroup, *parameters: Tensor | None) -> bool:
    """Whether `octic_mlp` is there for x: on the CPU, where no gradient needs the hidden features."""
    return x.is_cpu and fused(x, group) and not needs_grad(x, *parameters)


def octic_mlp(
    x: Tensor, first_1: Tensor, first_2: Tensor, bias: Tensor | None, second_1: Tensor, second_2: Tensor
) -> Tensor:
    """W₂ GELU(W₁ x + b), [..., C] → [..., F], without the bias of the second map; see `octic_linear`, `octic_gelu`.

    The hidden features of a few tokens at a time stay in the cache of the processor.
    """
    y = _mlp(x.flatten(0, -2), first_1, first_2, bias, second_1, second_2)
    return y.unflatten(0, x.shape[:-1])


@torch.library.custom_op("quickvit::octic_mlp", mutates_args=(), device_types="cpu")
def _mlp(
    x: Tensor, first_1: Tensor, first_2: Tensor, bias: Tensor | None, second_1: Tensor, second_2: Tensor
) -> Tensor:
    return mlp_forward(x if x.stride(1) == 1 else x.contiguous(), first_1, first_2, bias, second_1, second_2)


@_mlp.register_fake
def _(x, first_1, first_2, bias, second_1, second_2):
    return x.new_empty(x.shape[0], 8 * second_1.shape[1])


@register_flop_formula(torch.ops.quickvit.octic_mlp)
def _mlp_flops(x, first_1, first_2, bias, second_1, *_, **__) -> int:
    _, hidden, inputs = first_1
    return 2 * x[0] * 12 * hidden * (inputs + second_1[1])
