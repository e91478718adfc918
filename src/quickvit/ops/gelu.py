"""GELU through the regular domain, where it commutes with the group: y = Qᵀ GELU(Q x)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quickvit.group import D8, DihedralGroup, isotypic_to_regular, regular_to_isotypic
from quickvit.group.layout import packed_fourier_matrix
from quickvit.ops.backend import fused, is_plain

# Tokens per step on a CPU: the step's tensors then stay in the cache between the two transforms.
_CHUNK_ELEMENTS = 256 * 3072


def octic_gelu(x: Tensor, bias: Tensor | None = None, group: DihedralGroup = D8) -> Tensor:
    """GELU of a packed tensor [..., C], after adding `bias` [C/|G|] to A1."""
    if is_plain():
        return definition(x, bias, group)
    return _gelu(x.flatten(0, -2), bias, group.order).view(x.shape)


def definition(x: Tensor, bias: Tensor | None = None, group: DihedralGroup = D8) -> Tensor:
    """The same in standard operators."""
    if bias is not None:
        x = x + functional.pad(bias, (0, x.shape[-1] - bias.shape[0]))
    return regular_to_isotypic(functional.gelu(isotypic_to_regular(x, group)), group)


@torch.library.custom_op("quickvit::octic_gelu", mutates_args=())
def _gelu(x: Tensor, bias: Tensor | None, order: int) -> Tensor:
    x = x.contiguous()
    if fused(x, DihedralGroup(order)):
        from quickvit.ops.triton.gelu import gelu_forward

        return gelu_forward(x, bias)
    if bias is not None:
        x = x + functional.pad(bias.to(x.dtype), (0, x.shape[-1] - bias.shape[0]))
    q = packed_fourier_matrix(DihedralGroup(order)).to(x)
    y = torch.empty_like(x)
    for source, target in _chunks(order, x, y):
        torch.matmul(q.T, functional.gelu(q @ source), out=target)
    return y


@torch.library.custom_op("quickvit::octic_gelu_grad", mutates_args=())
def _gelu_grad(grad: Tensor, x: Tensor, bias: Tensor | None, order: int) -> Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    if fused(x, DihedralGroup(order)):
        from quickvit.ops.triton.gelu import gelu_backward

        return gelu_backward(grad, x, bias)
    if bias is not None:
        x = x + functional.pad(bias.to(x.dtype), (0, x.shape[-1] - bias.shape[0]))
    q = packed_fourier_matrix(DihedralGroup(order)).to(x)
    result = torch.empty_like(x)
    for g, source, target in _chunks(order, grad, x, result):
        torch.matmul(q.T, torch.ops.aten.gelu_backward(q @ g, q @ source), out=target)
    return result


def _chunks(order: int, *tensors: Tensor):
    """The tensors [T, C] as [tokens, |G|, C/|G|], a cache-sized number of tokens at a time."""
    step = max(1, _CHUNK_ELEMENTS // tensors[0].shape[1])
    yield from zip(*(t.unflatten(1, (order, -1)).split(step) for t in tensors), strict=True)


@_gelu.register_fake
def _(x: Tensor, bias: Tensor | None, order: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_gelu_grad.register_fake
def _(grad: Tensor, x: Tensor, bias: Tensor | None, order: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output) -> None:
    x, bias, ctx.order = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx, grad: Tensor):
    x, bias = ctx.saved_tensors
    grad_x = _gelu_grad(grad, x, bias, ctx.order)
    return grad_x, None if bias is None else grad_x[:, : bias.shape[0]].sum(0), None


_gelu.register_autograd(_backward, setup_context=_setup)
