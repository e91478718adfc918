"""A linear map and the attention of its result, where a kernel writes q, k and v the way attention reads best."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quickvit.group import D8, DihedralGroup
from quickvit.ops import hopper
from quickvit.ops.backend import fused, needs_grad
from quickvit.ops.linear import all_grads, products
from quickvit.ops.norm import deviation
from quickvit.ops.operator import closed_operator
from quickvit.ops.packing import Shapes, as_shapes, batches, pairs
from quickvit.ops.precision import autocast
from quickvit.ops.rows import flat, lines


def takes_self_attention(x: Tensor, heads: int, group: DihedralGroup, shapes: Shapes | None = None) -> bool:
    """Whether there are kernels for x: for heads of 64 or 80 on Hopper.

    And for so many features that launching them, which takes Python longer, matters little.
    """
    if not fused(x, group) or not hopper.are_many(x.numel()):
        return False
    channels = x.shape[-1]
    if channels == 64 * heads:
        return hopper.takes(x, 3 * channels)
    return hopper.takes_heads(x, heads, max(length for _, length in shapes or (x.shape[:2],)))


def octic_self_attention(
    x: Tensor,
    weight_1: Tensor,
    weight_2: Tensor,
    bias: Tensor | None,
    heads: int,
    *,
    shapes: Shapes | None = None,
    norm: tuple[float, float] | None = None,
) -> Tensor:
    """`octic_attention` of W x/σ with a bias, [B, N, C] → [B, N, C]; see `octic_linear`.

    σ is what a norm with this ε and weight of E divides a token by, through which there are no gradients, or 1.
    """
    if norm is not None and needs_grad(x, weight_1, weight_2, bias):
        raise ValueError("with a norm there are no gradients; call it within torch.no_grad()")
    x, weight_1, weight_2 = autocast(x, weight_1, weight_2)
    numbers, lengths = ([*of_all] for of_all in zip(*(shapes or (x.shape[:2],)), strict=True))
    operator = _head_attention if x.shape[-1] == 80 * heads else _self_attention
    if weight_1.dtype != x.dtype or weight_2.dtype != x.dtype:
        raise ValueError(f"expected weights in {x.dtype}, as x, got {weight_1.dtype} and {weight_2.dtype}")
    (bias,) = lines(bias)
    eps, pair_weight = norm or (None, 1.0)
    sizes = heads, numbers, lengths
    out: Tensor = operator(flat(x), weight_1, weight_2, bias, *sizes, eps, pair_weight)[0]
    return out.unflatten(0, x.shape[:-1])


# ---------------------------------------------------------------------- heads of 64


@closed_operator("octic_self_attention")
def _self_attention(
    x: Tensor,
    weight_1: Tensor,
    weight_2: Tensor,
    bias: Tensor | None,
    heads: int,
    numbers: list[int],
    lengths: list[int],
    eps: float | None,
    pair_weight: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and for the gradients q, k and v in runs and the log-sum-exp of the scores."""
    from quickvit.ops.triton.attention import attention_forward

    piece = x.shape[1] // (D8.order * heads)
    row_scale = None if eps is None else deviation(x, eps, pair_weight)
    qkv = hopper.kernels().linear_heads(x, weight_1, weight_2, bias, piece, row_scale)
    out, lse = attention_forward(qkv, None, heads, as_shapes(numbers, lengths), runs=True)
    return out, qkv, lse


@_self_attention.register_fake
def _(x, weight_1, weight_2, bias, heads, numbers, lengths, eps, pair_weight):
    tokens, channels = x.shape
    lse = x.new_empty(tokens * heads, dtype=torch.float32)
    return x.new_empty(tokens, channels), x.new_empty(tokens, 3 * channels), lse


@closed_operator("octic_self_attention_qkv_grad")
def _qkv_grad(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, numbers: list[int], lengths: list[int]
) -> Tensor:
    """The gradient of q, k and v, packed."""
    from quickvit.ops.triton.attention import attention_backward

    shapes = as_shapes(numbers, lengths)
    return attention_backward(grad.contiguous(), qkv, None, out, lse, heads, shapes, runs=True)


@_qkv_grad.register_fake
def _(grad, qkv, out, lse, heads, numbers, lengths):
    return torch.empty_like(qkv)


def _self_setup(ctx, inputs, output):
    x, weight_1, weight_2, bias, *ctx.sizes, _, _ = inputs
    out, qkv, lse = output
    ctx.save_for_backward(x, weight_1, weight_2, out, qkv, lse)
    ctx.mark_non_differentiable(qkv, lse)
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = x.dtype if bias is None else bias.dtype


def _self_backward(ctx, grad, *_):
    x, weight_1, weight_2, out, qkv, lse = ctx.saved_tensors
    grad_qkv = _qkv_grad(grad, qkv, out, lse, *ctx.sizes)
    grads = all_grads(ctx.needs_input_grad, grad_qkv, x, weight_1, weight_2, ctx.bias_dtype)
    return *grads, None, None, None, None, None


_self_attention.register_autograd(_self_backward, setup_context=_self_setup)


# ---------------------------------------------------------------------- heads of 80


@closed_operator("octic_head_attention")
def _head_attention(
    x: Tensor,
    weight_1: Tensor,
    weight_2: Tensor,
    bias: Tensor | None,
    heads: int,
    numbers: list[int],
    lengths: list[int],
    eps: float | None,
    pair_weight: float,
) -> list[Tensor]:
    """The result, and what gradients need of each batch.

    Of a short one that is packed qkv, of others q, k, v [3, B, N, H, D], their result [B, N, H, D] and the logarithms
    of sums [B, H, N].
    """
    from quickvit.ops.triton.heads import to_packed
    from quickvit.ops.triton.whole_head import SHORT, attention_of_batch

    out, kept = x.new_empty(x.shape), []
    for origin, shape in batches(numbers, lengths):
        tokens = slice(origin, origin + shape[0] * shape[1])
        if shape[1] <= SHORT:
            qkv = x.new_empty(tokens.stop - origin, 3 * x.shape[1])
            products(x[tokens], weight_1, weight_2, qkv)
            if eps is not None:
                qkv *= deviation(x[tokens], eps, pair_weight)[:, None]
            attention_of_batch(qkv, bias, out[tokens], heads, shape, 0)
            kept.append(qkv)
        else:
            norm = None if eps is None else (eps, pair_weight)
            qkv = hopper.heads_kernels().linear_heads(x[tokens], weight_1, weight_2, bias, norm)
            qkv = qkv.unflatten(1, shape)
            result, logs = hopper.attention_kernels().attention_forward(*qkv, pairs=True)
            to_packed([result], out, origin, pairs=True)
            kept += [qkv, result, logs]
    return [out, *kept]


@_head_attention.register_fake
def _(x, weight_1, weight_2, bias, heads, numbers, lengths, eps, pair_weight):
    from quickvit.ops.triton.whole_head import SHORT

    kept = []
    for number, length in as_shapes(numbers, lengths):
        size = number, length, heads, x.shape[1] // heads
        if length <= SHORT:
            kept.append(x.new_empty(number * length, 3 * x.shape[1]))
        else:
            kept += [x.new_empty(3, *size), x.new_empty(size)]
            kept.append(x.new_empty(number, heads, length, dtype=torch.float32))
    return [x.new_empty(x.shape), *kept]


@closed_operator("octic_head_attention_qkv_grad")
def _heads_grad(
    grad: Tensor, kept: list[Tensor], bias: Tensor | None, heads: int, numbers: list[int], lengths: list[int]
) -> Tensor:
    """The gradient of q, k and v, packed."""
    from quickvit.ops.triton.heads import to_heads, to_packed
    from quickvit.ops.triton.whole_head import SHORT, gradient_of_batch

    grad = grad.contiguous()
    grad_qkv = grad.new_empty(grad.shape[0], 3 * grad.shape[1])
    left = iter(kept)
    for origin, shape in batches(numbers, lengths):
        if shape[1] <= SHORT:
            tokens = slice(origin, origin + shape[0] * shape[1])
            gradient_of_batch(grad[tokens], next(left), bias, grad_qkv[tokens], heads, shape, 0)
        else:
            (dout,) = to_heads(grad, heads, 1, None, shape, origin, pairs=True)
            qkv, result, logs = (next(left) for _ in range(3))
            grads = hopper.gradient_kernels().attention_backward(dout, qkv, result, logs, pairs=True)
            to_packed([*grads], grad_qkv, origin, pairs=True)
    return grad_qkv


@_heads_grad.register_fake
def _(grad, kept, bias, heads, numbers, lengths):
    return grad.new_empty(grad.shape[0], 3 * grad.shape[1])


def _head_setup(ctx, inputs, output):
    x, weight_1, weight_2, bias, *ctx.sizes, _, _ = inputs
    ctx.save_for_backward(x, weight_1, weight_2, bias, *output[1:])
    ctx.set_materialize_grads(False)


def _head_backward(ctx, grads):
    x, weight_1, weight_2, bias, *kept = ctx.saved_tensors
    grad_qkv = _heads_grad(grads[0], kept, bias, *ctx.sizes)
    dtype = x.dtype if bias is None else bias.dtype
    return (
        *all_grads(ctx.needs_input_grad, grad_qkv, x, weight_1, weight_2, dtype),
        None,
        None,
        None,
        None,
        None,
    )


_head_attention.register_autograd(_head_backward, setup_context=_head_setup)


_ops = torch.ops.quickvit


@register_flop_formula([_ops.octic_self_attention, _ops.octic_head_attention])
def _self_attention_flops(x, weight_1, weight_2, bias, heads, numbers, lengths, *_, **__):
    _, rows, columns = weight_1
    return 2 * x[0] * 12 * rows * columns + 4 * pairs(numbers, lengths) * x[1]


@register_flop_formula(_ops.octic_self_attention_qkv_grad)
def _qkv_grad_flops(grad, qkv, out, lse, heads, numbers, lengths, **__):
    return 10 * pairs(numbers, lengths) * grad[1]


@register_flop_formula(_ops.octic_head_attention_qkv_grad)
def _heads_grad_flops(grad, kept, bias, heads, numbers, lengths, **__):
    return 10 * pairs(numbers, lengths) * grad[1]
