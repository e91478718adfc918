"""GELU through the regular domain, where it commutes with the group: y = Qᵀ GELU(Q x)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quickvit.group import D8, DihedralGroup, isotypic_to_regular, regular_to_isotypic
from quickvit.group.layout import packed_fourier_matrix
from quickvit.ops.backend import fused, is_plain, needs_grad
from quickvit.ops.operator import closed_operator, fused_operator, kernels
from quickvit.ops.rows import flat, lines, require_length

# Elements per step off the fused path: 1.5 MB in single precision.
_STEP_ELEMENTS = 128 * 3072


def octic_gelu(
    x: Tensor, bias: Tensor | None = None, group: DihedralGroup = D8, *, overwrite: bool = False
) -> Tensor:
    """GELU of a packed tensor [..., C], after adding `bias` [C/|G|] to A1.

    With `overwrite` the caller has no more use for x, and where no gradient needs it either, it holds the result.
    """
    in_one_kernel = fused(x, group)
    if is_plain() or (x.is_cuda and not in_one_kernel):
        return definition(x, bias, group)
    if x.shape[-1] % group.order:
        raise ValueError(f"expected a multiple of {group.order} channels for {group}, got {x.shape[-1]}")
    require_length(x.shape[-1] // group.order, bias=bias)
    rows, (bias,) = flat(x), lines(bias)
    if overwrite and x.is_contiguous() and not needs_grad(x, bias):
        if in_one_kernel:
            _fused_gelu_into(rows, bias)
        else:
            _gelu_into(rows, bias, group.order)
        return x
    y = _fused_gelu(rows, bias) if in_one_kernel else _gelu(rows, bias, group.order)
    return y.view(x.shape)


def definition(x: Tensor, bias: Tensor | None = None, group: DihedralGroup = D8) -> Tensor:
    """The same in standard operators."""
    if bias is not None:
        x = x + functional.pad(bias, (0, x.shape[-1] - bias.shape[0]))
    return regular_to_isotypic(functional.gelu(isotypic_to_regular(x, group)), group)


# ---------------------------------------------------------------------- in one kernel


@fused_operator("octic_gelu_fused")
def _fused_gelu(x: Tensor, bias: Tensor | None) -> Tensor:
    x = x.contiguous()
    return kernels(x, "gelu").gelu_forward(x, bias)


@_fused_gelu.register_fake
def _(x: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@fused_operator("octic_gelu_fused_", mutates_args=("x",))
def _fused_gelu_into(x: Tensor, bias: Tensor | None) -> None:
    kernels(x, "gelu").gelu_forward(x, bias, x)


@_fused_gelu_into.register_fake
def _(x: Tensor, bias: Tensor | None) -> None:
    return None


@fused_operator("octic_gelu_fused_grad")
def _fused_gelu_grad(grad: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return kernels(x, "gelu").gelu_backward(grad.contiguous(), x.contiguous(), bias)


@_fused_gelu_grad.register_fake
def _(grad: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fused_setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _fused_backward(ctx, grad: Tensor):
    x, bias = ctx.saved_tensors
    grad_x = _fused_gelu_grad(grad, x, bias)
    return grad_x, grad_x[:, : bias.shape[0]].sum(0) if ctx.needs_input_grad[1] else None


_fused_gelu.register_autograd(_fused_backward, setup_context=_fused_setup)


# ---------------------------------------------------------------------- with products, a few tokens at a time


@closed_operator("octic_gelu")
def _gelu(x: Tensor, bias: Tensor | None, order: int) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    _forward(x, bias, order, y)
    return y


@closed_operator("octic_gelu_", mutates_args=("x",))
def _gelu_into(x: Tensor, bias: Tensor | None, order: int) -> None:
    _forward(x, bias, order, x)


def _forward(x: Tensor, bias: Tensor | None, order: int, out: Tensor) -> None:
    """GELU of x written to out, which may be x."""
    regular = _Regular(x, bias, order)
    for source, target in zip(regular.chunks(x), regular.chunks(out), strict=True):
        regular.to_isotypic(torch.ops.aten.gelu_(regular.values(source)), target)


@closed_operator("octic_gelu_grad")
def _gelu_grad(grad: Tensor, x: Tensor, bias: Tensor | None, order: int) -> Tensor:
    grad, x = grad.contiguous(), x.contiguous()
    result = torch.empty_like(x)
    regular, slopes = _Regular(x, bias, order), _Regular(grad, None, order)
    for g, source, target in zip(*map(regular.chunks, (grad, x, result)), strict=True):
        slope = torch.ops.aten.gelu_backward(slopes.values(g), regular.values(source))
        regular.to_isotypic(slope, target)
    return result


class _Regular:
    """The regular domain of a packed tensor [T, C], a few tokens at a time.

    The transforms are products with the Fourier matrix: on a CPU these are faster than butterflies. The values of
    one step stay in the cache between the transforms, in one buffer.
    """

    def __init__(self, x: Tensor, bias: Tensor | None, order: int) -> None:
        tokens, channels = x.shape
        self.order = order
        self.step = max(1, min(tokens, _STEP_ELEMENTS // channels))
        self.matrix = packed_fourier_matrix(DihedralGroup(order)).to(x)
        self.buffer = x.new_empty(self.step, order, channels // order)
        # A1 enters every regular component alike, so its bias does too.
        self.bias = None if bias is None else self.matrix[0, 0] * bias.to(x.dtype)

    def chunks(self, x: Tensor) -> tuple[Tensor, ...]:
        return x.unflatten(1, (self.order, -1)).split(self.step)

    def values(self, source: Tensor) -> Tensor:
        """Q (x + bias)."""
        buffer = self.buffer[: len(source)]
        torch.bmm(self.matrix.expand(len(source), -1, -1), source, out=buffer)
        return buffer if self.bias is None else buffer.add_(self.bias)

    def to_isotypic(self, values: Tensor, target: Tensor) -> None:
        """Qᵀ values."""
        torch.bmm(self.matrix.T.expand(len(values), -1, -1), values, out=target)


@_gelu.register_fake
def _(x: Tensor, bias: Tensor | None, order: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_gelu_into.register_fake
def _(x: Tensor, bias: Tensor | None, order: int) -> None:
    return None


@_gelu_grad.register_fake
def _(grad: Tensor, x: Tensor, bias: Tensor | None, order: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup(ctx, inputs, output) -> None:
    x, bias, ctx.order = inputs
    ctx.save_for_backward(x, bias)


def _backward(ctx, grad: Tensor):
    x, bias = ctx.saved_tensors
    grad_x = _gelu_grad(grad, x, bias, ctx.order)
    return grad_x, grad_x[:, : bias.shape[0]].sum(0) if ctx.needs_input_grad[1] else None, None


_gelu.register_autograd(_backward, setup_context=_setup)
