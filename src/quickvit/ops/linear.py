"""The equivariant linear map on a packed tensor: block-diagonal, both components of E under one weight.

Shapes: x [..., C]; weight_1 [n1, F/|G|, C/|G|], one matrix per one-dimensional irrep; weight_2
[n2, 2F/|G|, 2C/|G|], one per two-dimensional irrep; bias [F/|G|] on A1; result [..., F].
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quickvit.group import DihedralGroup
from quickvit.ops import hopper
from quickvit.ops.backend import fused, is_plain
from quickvit.ops.cpu.linear import linear_forward
from quickvit.ops.operator import closed_operator
from quickvit.ops.precision import autocast
from quickvit.ops.rows import flat
from quickvit.ops.streams import side_by_side

_group = cache(DihedralGroup)


def octic_linear(x: Tensor, weight_1: Tensor, weight_2: Tensor, bias: Tensor | None = None) -> Tensor:
    """y_ρ = W_ρ x_ρ for each irrep ρ (Schur's lemma), plus a bias on A1."""
    if is_plain():
        return definition(x, weight_1, weight_2, bias)
    x, weight_1, weight_2 = autocast(x, weight_1, weight_2)
    y = linear(flat(x), weight_1, weight_2, None if bias is None else bias.to(x.dtype))
    return y.view(*x.shape[:-1], y.shape[1])


def octic_product(x: Tensor, weight_1: Tensor, weight_2: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The map without its bias, for a next step that adds it, and the bias without a gradient for that step.

    The gradient of the result is also the bias's, which is computed beside those of the weights. Where kernels are.
    """
    x, weight_1, weight_2 = autocast(x, weight_1, weight_2)
    y: Tensor = _product(flat(x), weight_1, weight_2, bias)
    return y.view(*x.shape[:-1], y.shape[1]), bias.detach()


def definition(x: Tensor, weight_1: Tensor, weight_2: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same map in standard operators."""
    n1, _, width = weight_1.shape
    split = n1 * width
    one = torch.einsum("...ni,noi->...no", x[..., :split].unflatten(-1, (n1, width)), weight_1)
    if bias is not None:
        one = torch.cat([one[..., :1, :] + bias, one[..., 1:, :]], dim=-2)
    if not len(weight_2):
        return one.flatten(-2)
    pairs = x[..., split:].unflatten(-1, (len(weight_2), 2, 2 * width))
    two = torch.einsum("...npi,noi->...npo", pairs, weight_2)
    return torch.cat([one.flatten(-2), two.flatten(-3)], dim=-1)


def _views(x: Tensor, n1: int, n2: int) -> tuple[Tensor, list[Tensor]]:
    """The blocks of x [T, C] as batches, without a copy: [n1, T, w] and n2 times [2, T, 2w]."""
    tokens, channels = x.shape
    w = channels // (n1 + 4 * n2)
    start, stride = x.storage_offset(), x.stride(0)
    one = x.as_strided((n1, tokens, w), (w, stride, 1), start)
    first = start + n1 * w
    two = [x.as_strided((2, tokens, 2 * w), (2 * w, stride, 1), first + 4 * w * i) for i in range(n2)]
    return one, two


@closed_operator("octic_linear")
def linear(x: Tensor, weight_1: Tensor, weight_2: Tensor, bias: Tensor | None) -> Tensor:
    """The map of x [T, C]."""
    n1, n2 = len(weight_1), len(weight_2)
    order = n1 + 4 * n2
    if x.shape[1] != order * weight_1.shape[2]:
        raise ValueError(
            f"expected {order * weight_1.shape[2]} channels, as the weights have, got {x.shape[1]}"
        )
    if x.is_cpu and x.shape[0] and fused(x, _group(order)):
        return linear_forward(x if x.stride(1) == 1 else x.contiguous(), weight_1, weight_2, bias)
    y = x.new_empty(x.shape[0], order * weight_1.shape[1])
    products(x, weight_1, weight_2, y, bias)
    return y


def products(
    x: Tensor,
    weight_1: Tensor,
    weight_2: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    add: bool = False,
) -> None:
    """Write the map of x [T, C] to out [T, F], or add it: each product straight into its place of the result."""
    _require_alike(weight_1, weight_2, bias)
    if not x.shape[0]:
        return
    if x.stride(1) != 1:
        x = x.contiguous()
    n1, n2 = len(weight_1), len(weight_2)
    x_one, x_two = _views(x, n1, n2)
    y_one, y_two = _views(out, n1, n2)
    # A CPU takes them one by one: its batched product would copy strided operands. A GPU takes each family of equal
    # blocks in one launch, or all of them.
    if x.is_cpu:
        for i, w in enumerate(weight_1):
            _multiply(x_one[i], w.T, y_one[i], add)
        for xs, ys, w in zip(x_two, y_two, weight_2, strict=True):
            for component in range(2):
                _multiply(xs[component], w.T, ys[component], add)
        _add_bias(bias, out)
    elif not add and (n1, n2) == (4, 1) and hopper.launches(x, weight_1, out):
        hopper.kernels().linear(x, weight_1, weight_2, out)
        _add_bias(bias, out)
    else:
        with side_by_side(x.device) as branch:
            with branch:
                _multiply(x_one, weight_1.mT, y_one, add)
                _add_bias(bias, out)
            for xs, ys, w in zip(x_two, y_two, weight_2, strict=True):
                _multiply(xs, w.T.expand(2, -1, -1), ys, add)


def _require_alike(weight_1: Tensor, weight_2: Tensor, bias: Tensor | None) -> None:
    """Refuse parameters of different maps: products would be written past, or beside, their places."""
    _, rows, columns = weight_1.shape
    if weight_2.shape[1:] != (2 * rows, 2 * columns) or (bias is not None and bias.shape != (rows,)):
        shapes = [tuple(t.shape) for t in (weight_1, weight_2, bias) if t is not None]
        raise ValueError(f"expected weights [n, o, i] and [m, 2o, 2i] and a bias [o], got {shapes}")


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool) -> None:
    """Write a b to out, or add it: matrices, or batches of them."""
    write, more = (torch.mm, torch.addmm) if a.ndim == 2 else (torch.bmm, torch.baddbmm)
    if add:
        more(out, a, b, out=out)
    else:
        write(a, b, out=out)


def _add_bias(bias: Tensor | None, out: Tensor) -> None:
    if bias is not None:
        out[:, : bias.shape[0]] += bias


@linear.register_fake
def _(x: Tensor, weight_1: Tensor, weight_2: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(x.shape[0], weight_1.shape[1] * (len(weight_1) + 4 * len(weight_2)))


@closed_operator("octic_linear_onto", mutates_args=("y",))
def linear_onto(y: Tensor, x: Tensor, weight_1: Tensor, weight_2: Tensor, bias: Tensor | None) -> None:
    """Add the map of x [T, C], and a bias of A1, to y [T, F], without a pass of its own."""
    products(x, weight_1, weight_2, y, bias, add=True)


@linear_onto.register_fake
def _(y: Tensor, x: Tensor, weight_1: Tensor, weight_2: Tensor, bias: Tensor | None) -> None:
    return None


@closed_operator("octic_linear_weight_grad")
def weight_grad(grad: Tensor, x: Tensor, n1: int, n2: int) -> tuple[Tensor, Tensor]:
    """The gradients of both weights, from those of the result, [T, F], and x [T, C]."""
    if x.stride(1) != 1:
        x = x.contiguous()
    if grad.is_cuda and fused(grad, _group(n1 + 4 * n2)):
        from quickvit.ops.triton.weight_gradient import takes, weight_gradient

        if takes(grad, x):
            return weight_gradient(grad, x)
    grad_one, grad_two = _views(grad, n1, n2)
    x_one, x_two = _views(x, n1, n2)
    dtype = grad.dtype
    shape_1 = (n1, grad_one.shape[2], x_one.shape[2])
    shape_2 = (n2, 2 * shape_1[1], 2 * shape_1[2])
    weight_1, weight_2 = x.new_empty(shape_1, dtype=dtype), x.new_empty(shape_2, dtype=dtype)
    if grad.is_cpu:
        for i in range(n1):
            torch.mm(grad_one[i].T, x_one[i], out=weight_1[i])
    else:
        torch.bmm(grad_one.mT, x_one, out=weight_1)
    for i in range(n2):
        # Written to a place: autocast would convert the operands of products that return their result.
        torch.mm(grad_two[i][0].T, x_two[i][0], out=weight_2[i])
        torch.addmm(weight_2[i], grad_two[i][1].T, x_two[i][1], out=weight_2[i])
    return weight_1, weight_2


@weight_grad.register_fake
def _(grad: Tensor, x: Tensor, n1: int, n2: int) -> tuple[Tensor, Tensor]:
    order = n1 + 4 * n2
    rows, columns = grad.shape[1] // order, x.shape[1] // order
    return grad.new_empty(n1, rows, columns), grad.new_empty(n2, 2 * rows, 2 * columns)


@closed_operator("octic_linear_bias_grad")
def _bias_grad(grad: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """The gradient of the bias, the first `width` columns of the result."""
    # PyTorch's sum over so many rows of so few columns leaves most of a GPU idle.
    if grad.is_cuda and fused(grad, _group(grad.shape[1] // width)):
        from quickvit.ops.triton.weight_gradient import bias_gradient

        return bias_gradient(grad, width, dtype)
    return grad[:, :width].sum(0, dtype=dtype)


@_bias_grad.register_fake
def _(grad: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    return grad.new_empty(width, dtype=dtype)


@closed_operator("octic_linear_grads")
def linear_grads(
    grad: Tensor, x: Tensor, weight_1: Tensor, weight_2: Tensor, biased: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, of both weights and of a bias of some dtype, empty without one, from that of the result."""
    with side_by_side(grad.device, 1) as one, side_by_side(grad.device, 2) as other:
        with one:
            grad_1, grad_2 = weight_grad(grad, x, len(weight_1), len(weight_2))
        grad_bias = grad.new_empty(0, dtype=dtype)
        if biased:
            with other:
                grad_bias = _bias_grad(grad, weight_1.shape[1], dtype)
        grad_x = linear(grad, weight_1.mT, weight_2.mT, None)
    return grad_x, grad_1, grad_2, grad_bias


@linear_grads.register_fake
def _(grad, x, weight_1, weight_2, biased, dtype):
    bias = grad.new_empty(weight_1.shape[1] if biased else 0, dtype=dtype)
    return grad.new_empty(x.shape), grad.new_empty(weight_1.shape), grad.new_empty(weight_2.shape), bias


def all_grads(
    wanted: tuple[bool, ...], grad: Tensor, x: Tensor, weight_1: Tensor, weight_2: Tensor, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of x, of both weights and of a bias of this dtype that are wanted."""
    of_x, of_weights, of_bias = wanted[0], any(wanted[1:3]), wanted[3]
    if of_x and of_weights:
        *grads, grad_bias = linear_grads(grad, x, weight_1, weight_2, of_bias, dtype)
        return *grads, grad_bias if of_bias else None
    grad_x = linear(grad, weight_1.mT, weight_2.mT, None) if of_x else None
    grads = weight_grad(grad, x, len(weight_1), len(weight_2)) if of_weights else (None, None)
    return grad_x, *grads, _bias_grad(grad, weight_1.shape[1], dtype) if of_bias else None


def _setup(ctx, inputs, output) -> None:
    x, weight_1, weight_2, bias = inputs
    ctx.save_for_backward(x, weight_1, weight_2)
    ctx.bias_dtype = x.dtype if bias is None else bias.dtype


def _backward(ctx, grad: Tensor):
    x, weight_1, weight_2 = ctx.saved_tensors
    return all_grads(ctx.needs_input_grad, grad.contiguous(), x, weight_1, weight_2, ctx.bias_dtype)


linear.register_autograd(_backward, setup_context=_setup)


@closed_operator("octic_product")
def _product(x: Tensor, weight_1: Tensor, weight_2: Tensor, bias: Tensor) -> Tensor:
    return linear(x, weight_1, weight_2, None)


@_product.register_fake
def _(x: Tensor, weight_1: Tensor, weight_2: Tensor, bias: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight_1.shape[1] * (len(weight_1) + 4 * len(weight_2)))


_product.register_autograd(_backward, setup_context=_setup)


@register_flop_formula([torch.ops.quickvit.octic_linear, torch.ops.quickvit.octic_product])
def _linear_flops(x, weight_1, weight_2, *_, **__) -> int:
    n1, rows, columns = weight_1
    return 2 * x[0] * (n1 + 8 * weight_2[0]) * rows * columns


@register_flop_formula(torch.ops.quickvit.octic_linear_onto)
def _linear_onto_flops(y, x, weight_1, weight_2, *_, **__) -> int:
    return _linear_flops(x, weight_1, weight_2)


@register_flop_formula(torch.ops.quickvit.octic_linear_grads)
def _linear_grads_flops(grad, x, weight_1, weight_2, *_, **__) -> int:
    return 2 * _linear_flops(x, weight_1, weight_2)


@register_flop_formula(torch.ops.quickvit.octic_linear_weight_grad)
def _weight_grad_flops(grad, x, n1, n2, *_, **__) -> int:
    order = n1 + 4 * n2
    return 2 * x[0] * (n1 + 8 * n2) * (grad[1] // order) * (x[1] // order)
