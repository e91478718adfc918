"""The perceptron of a block in one step: two equivariant linear maps with GELU through the regular domain between."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quickvit.group import DihedralGroup
from quickvit.ops import hopper
from quickvit.ops.backend import fused, needs_grad
from quickvit.ops.cpu.linear import mlp_forward
from quickvit.ops.linear import products
from quickvit.ops.norm import deviation
from quickvit.ops.operator import closed_operator, kernels
from quickvit.ops.precision import autocast
from quickvit.ops.rows import flat, lines

# Bytes of the hidden features that exist at one time on a GPU: enough to keep it busy.
HIDDEN_BYTES = 400 * 2**20


def takes_mlp(x: Tensor, group: DihedralGroup, *parameters: Tensor | None) -> bool:
    """Whether `octic_mlp` is there for x: where kernels are, and no gradient needs the hidden features."""
    return fused(x, group) and not needs_grad(x, *parameters)


def octic_mlp(
    x: Tensor,
    first_1: Tensor,
    first_2: Tensor,
    bias: Tensor | None,
    second_1: Tensor,
    second_2: Tensor,
    *,
    overwrite: bool = False,
) -> Tensor:
    """W₂ GELU(W₁ x + b), [..., C] → [..., F], without the bias of the second map; see `octic_linear`, `octic_gelu`.

    The hidden features, which are the largest tensor of a model, exist of a part of the tokens at a time: on a CPU of
    so few that they stay in the cache. With `overwrite` the caller has no more use for x, and on a GPU it holds the
    result if it is as wide.
    """
    x, first_1, first_2, second_1, second_2 = autocast(x, first_1, first_2, second_1, second_2)
    parameters = first_1, first_2, *lines(bias), second_1, second_2
    rows = flat(x)
    if overwrite and x.is_cuda and x.is_contiguous() and first_1.shape[2] == second_1.shape[1]:
        _mlp_into(rows, *parameters)
        return x
    y: Tensor = _mlp(rows, *parameters)
    return y.view(*x.shape[:-1], y.shape[1])


@closed_operator("octic_mlp_onto", mutates_args=("x",))
def mlp_onto(
    x: Tensor,
    eps: float,
    pair_weight: float,
    first_1: Tensor,
    first_2: Tensor,
    bias: Tensor | None,
    second_1: Tensor,
    second_2: Tensor,
    second_bias: Tensor | None,
) -> None:
    """Add W₂ GELU(W₁ x/σ + b₁) + b₂ to x [T, C]; σ is what a norm divides a token by, see `octic_mlp`."""
    second = (second_1, second_2)
    in_parts(x, x, (first_1, first_2), bias, second, second_bias, norm=(eps, pair_weight), add=True)


@closed_operator("octic_mlp")
def _mlp(
    x: Tensor, first_1: Tensor, first_2: Tensor, bias: Tensor | None, second_1: Tensor, second_2: Tensor
) -> Tensor:
    x = x if x.stride(1) == 1 else x.contiguous()
    if x.is_cpu and x.shape[0]:
        return mlp_forward(x, first_1, first_2, bias, second_1, second_2)
    y = x.new_empty(x.shape[0], 8 * second_1.shape[1])
    if not x.shape[0]:
        return y
    in_parts(x, y, (first_1, first_2), bias, (second_1, second_2))
    return y


@closed_operator("octic_mlp_", mutates_args=("x",))
def _mlp_into(
    x: Tensor, first_1: Tensor, first_2: Tensor, bias: Tensor | None, second_1: Tensor, second_2: Tensor
) -> None:
    in_parts(x, x, (first_1, first_2), bias, (second_1, second_2))


def in_parts(
    x: Tensor,
    y: Tensor,
    first: tuple[Tensor, Tensor],
    bias: Tensor | None,
    second: tuple[Tensor, Tensor],
    second_bias: Tensor | None = None,
    *,
    norm: tuple[float, float] | None = None,
    add: bool = False,
) -> None:
    """The perceptron of x written or added to y, which may be x: by way of a buffer for the hidden features of some
    tokens. Before the first bias tokens are divided by what a norm with this ε and weight of E divides them by.
    """
    width = 8 * first[0].shape[1]
    parts = max(1, -(-x.shape[0] * width * x.element_size() // HIDDEN_BYTES))
    step = max(1, -(-x.shape[0] // parts))
    buffer = x.new_empty(step, width)
    for part, out in zip(x.split(step), y.split(step), strict=True):
        hidden = buffer[: len(part)]
        activate(part, *first, bias, hidden, norm)
        products(hidden, *second, out, second_bias, add=add)


def activate(
    x: Tensor,
    weight_1: Tensor,
    weight_2: Tensor,
    bias: Tensor | None,
    out: Tensor,
    norm: tuple[float, float] | None = None,
) -> None:
    """GELU(W x/σ + b) written to `out`, on a GPU; σ is what a norm with this ε and weight of E divides by, or 1."""
    if hopper.launches_gelu(x, weight_1, bias, out, normed=norm is not None):
        hopper.gelu_kernels().linear_gelu(x, weight_1, weight_2, bias, out, norm)
    else:
        row_scale = None if norm is None else deviation(x, *norm)
        products(x, weight_1, weight_2, out)
        kernels(x, "gelu").gelu_forward(out, bias, out, row_scale)


@mlp_onto.register_fake
def _(x, eps, pair_weight, first_1, first_2, bias, second_1, second_2, second_bias):
    return None


@_mlp_into.register_fake
def _(x, first_1, first_2, bias, second_1, second_2):
    return None


@_mlp.register_fake
def _(x, first_1, first_2, bias, second_1, second_2):
    return x.new_empty(x.shape[0], 8 * second_1.shape[1])


@register_flop_formula([torch.ops.quickvit.octic_mlp, torch.ops.quickvit.octic_mlp_])
def _mlp_flops(x, first_1, first_2, bias, second_1, *_, **__) -> int:
    _, hidden, inputs = first_1
    return 2 * x[0] * 12 * hidden * (inputs + second_1[1])


@register_flop_formula(torch.ops.quickvit.octic_mlp_onto)
def _mlp_onto_flops(x, eps, pair_weight, *rest, **__) -> int:
    return _mlp_flops(x, *rest)
