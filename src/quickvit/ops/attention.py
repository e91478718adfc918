"""Multi-head self-attention on packed channels.

qkv [B, N, 3C] is the packed result of an octic linear map; in each of its blocks the channels run over
(q k v, head, channel). A head of size D = C/H collects its channels of all blocks, so that every head holds a
multiple of ρ_iso and its logits are invariant.

Sequences of several lengths come packed too, see `packing`. Operators read and write tokens [T, ...] and are told
the shapes as two lists: each batch has its place in the one result, and in the one gradient, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quickvit.group import D8, DihedralGroup, Layout
from quickvit.ops import hopper
from quickvit.ops.backend import fused, needs_grad
from quickvit.ops.linear import all_grads, products
from quickvit.ops.operator import (
    closed_operator,
    fused_operator,
    kernels,
    open_operator,
    seen,
    straight,
    written,
)
from quickvit.ops.packing import Shapes, attend, pack, unpack
from quickvit.ops.precision import autocast
from quickvit.ops.rows import flat, lines


def octic_attention(
    qkv: Tensor,
    heads: int,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    shapes: Shapes | None = None,
    dropout: float = 0.0,
    overwrite: bool = False,
) -> Tensor:
    """softmax(q kᵀ / √D) v for every head, [B, N, 3C] → [B, N, C]; `bias` [3C/|G|] is added to A1 first.

    `layout` is that of qkv. Packed sequences [T, 3C] → [T, C] come with their `shapes`. With `overwrite` the caller
    has no more use for qkv.
    """
    if shapes is None:
        batch = qkv.shape[0], qkv.shape[1]
        tokens = qkv.flatten(0, 1)
        out = octic_attention(
            tokens, heads, layout, bias, shapes=(batch,), dropout=dropout, overwrite=overwrite
        )
        return out.unflatten(0, batch)
    if sum(number * length for number, length in shapes) != qkv.shape[0]:
        raise ValueError(f"sequences of shapes {shapes} do not make the {qkv.shape[0]} tokens that there are")
    if not fused(qkv, layout.group) or (dropout and qkv.is_cpu):
        return definition(qkv, heads, layout, bias, shapes=shapes, dropout=dropout)
    numbers, lengths = ([*sizes] for sizes in zip(*shapes, strict=True))
    (bias,) = lines(bias)
    if not dropout and _reads_packed(qkv, heads):
        return _attention(qkv, bias, heads, numbers, lengths)[0]
    if not dropout and _fits_whole_heads(qkv, bias, heads, max(lengths)):
        return _whole_heads(qkv, bias, heads, numbers, lengths)
    if overwrite and qkv.is_contiguous() and not seen(qkv, bias):
        q, k, v = (unpack(x, shapes) for x in _into_heads(qkv, heads, bias))
        batches = zip(q, k, v, strict=True)
    else:
        features = _split_heads(qkv, bias, heads, numbers, lengths)
        batches = zip(features[::3], features[1::3], features[2::3], strict=True)
    return _merge_heads([_attend(*batch, dropout) for batch in batches])


def _attend(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Attention of heads [B, N, H, D]."""
    if not dropout and not needs_grad(q, k, v) and hopper.takes_attention(q, graded=False):
        return _attention_of_heads(q, k, v)
    return attend(q, k, v, dropout=dropout)


@closed_operator("octic_attention_of_heads")
def _attention_of_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = hopper.attention_kernels().attention_forward(q, k, v, pairs=False)[0]
    return out


@_attention_of_heads.register_fake
def _(q, k, v):
    return q.new_empty(q.shape)


def takes_self_attention(x: Tensor, heads: int, group: DihedralGroup, shapes: Shapes | None = None) -> bool:
    """Whether `octic_self_attention` is there for x: where a kernel writes q, k, v the way attention reads best.

    That is for heads of 64 or 80, and for so many features that launching it, which takes Python longer, matters
    little.
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
) -> Tensor:
    """`octic_attention` of W x with a bias, [B, N, C] → [B, N, C]; see `octic_linear`."""
    x, weight_1, weight_2 = autocast(x, weight_1, weight_2)
    numbers, lengths = ([*sizes] for sizes in zip(*(shapes or (x.shape[:2],)), strict=True))
    operator = _head_attention if x.shape[-1] == 80 * heads else _self_attention
    if weight_1.dtype != x.dtype or weight_2.dtype != x.dtype:
        raise ValueError(f"expected weights in {x.dtype}, as x, got {weight_1.dtype} and {weight_2.dtype}")
    out: Tensor = operator(flat(x), weight_1, weight_2, *lines(bias), heads, numbers, lengths)[0]
    return out.unflatten(0, x.shape[:-1])


def definition(
    qkv: Tensor,
    heads: int,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    shapes: Shapes,
    dropout: float = 0.0,
) -> Tensor:
    """The same with `scaled_dot_product_attention`, the channels copied into heads and back."""
    blocks = qkv.split([block.width for block in layout.blocks], dim=-1)
    pieces = [block.unflatten(-1, (3, heads, -1)) for block in blocks]
    if bias is not None:
        pieces[0] = pieces[0] + bias.unflatten(0, (3, heads, -1))
    batches = unpack(torch.cat(pieces, dim=-1), shapes)
    out, _ = pack([attend(*batch.permute(2, 0, 1, 3, 4), dropout=dropout) for batch in batches])
    parts = out.split([piece.shape[-1] for piece in pieces], dim=-1)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)


def _reads_packed(qkv: Tensor, heads: int) -> bool:
    """Whether a kernel that reads packed channels takes these heads: on a GPU, pieces of 16 or 32 bytes, aligned."""
    if qkv.is_cpu:
        return True
    return qkv.element_size() == 2 and qkv.shape[-1] // (3 * D8.order * heads) in (8, 16)


def _fits_whole_heads(qkv: Tensor, bias: Tensor | None, heads: int, longest: int) -> bool:
    """Whether the kernel that keeps a head's keys and values takes these; it has no gradient."""
    from quickvit.ops.triton.whole_head import takes

    dim = qkv.shape[-1] // (3 * heads)
    return qkv.element_size() == 2 and not needs_grad(qkv, bias) and takes(longest, dim, qkv.device)


@open_operator("octic_whole_heads")
def _whole_heads(
    qkv: Tensor, bias: Tensor | None, heads: int, numbers: list[int], lengths: list[int]
) -> Tensor:
    from quickvit.ops.triton.whole_head import attention_whole_head

    return attention_whole_head(qkv.contiguous(), bias, heads, _shapes(numbers, lengths))


@straight
def _into_heads(qkv: Tensor, heads: int, bias: Tensor | None) -> Tensor:
    """q, k and v [3, T, H, D] in the place of qkv."""
    from quickvit.ops.triton.heads import into_heads

    features = into_heads(qkv, heads, bias)
    written(qkv)
    return features


@open_operator("octic_split_heads")
def _split_heads(
    qkv: Tensor, bias: Tensor | None, heads: int, numbers: list[int], lengths: list[int]
) -> list[Tensor]:
    """q, k and v [B, N, H, D] of each batch in turn."""
    from quickvit.ops.triton.heads import to_heads

    qkv = qkv.contiguous()
    batches = _batches(numbers, lengths)
    return [x for origin, shape in batches for x in to_heads(qkv, heads, 3, bias, shape, origin)]


@_split_heads.register_fake
def _(qkv, bias, heads, numbers, lengths):
    return _new_heads(qkv, heads, 3, numbers, lengths)


def _to_packed(features: list[Tensor], parts: int) -> Tensor:
    """`parts` features [B, N, H, D] of each batch in turn as packed channels."""
    from quickvit.ops.triton.heads import to_packed

    packed = _new_packed(features, parts)
    origin = 0
    for first in range(0, len(features), parts):
        batch = [x.contiguous() for x in features[first : first + parts]]
        to_packed(batch, packed, origin)
        origin += batch[0].shape[0] * batch[0].shape[1]
    return packed


@open_operator("octic_split_heads_grad")
def _split_heads_grad(features: list[Tensor]) -> Tensor:
    return _to_packed(features, 3)


@_split_heads_grad.register_fake
def _(features):
    return _new_packed(features, 3)


def _split_setup(ctx, inputs, output):
    _, bias, *_ = inputs
    ctx.bias_width = None if bias is None else bias.shape[0]


def _split_backward(ctx, features):
    grad = _split_heads_grad(features)
    grad_bias = grad[:, : ctx.bias_width].sum(0) if ctx.needs_input_grad[1] else None
    return grad, grad_bias, None, None, None


_split_heads.register_autograd(_split_backward, setup_context=_split_setup)


@open_operator("octic_merge_heads")
def _merge_heads(features: list[Tensor]) -> Tensor:
    """The results [B, N, H, D] of all batches as packed channels."""
    return _to_packed(features, 1)


@_merge_heads.register_fake
def _(features):
    return _new_packed(features, 1)


@open_operator("octic_merge_heads_grad")
def _merge_heads_grad(grad: Tensor, heads: int, numbers: list[int], lengths: list[int]) -> list[Tensor]:
    from quickvit.ops.triton.heads import to_heads

    grad = grad.contiguous()
    batches = _batches(numbers, lengths)
    return [to_heads(grad, heads, 1, None, shape, origin)[0] for origin, shape in batches]


@_merge_heads_grad.register_fake
def _(grad, heads, numbers, lengths):
    return _new_heads(grad, heads, 1, numbers, lengths)


def _merge_setup(ctx, inputs, output):
    (features,) = inputs
    ctx.heads = features[0].shape[2]
    ctx.numbers, ctx.lengths = [x.shape[0] for x in features], [x.shape[1] for x in features]


def _merge_backward(ctx, grad):
    return _merge_heads_grad(grad, ctx.heads, ctx.numbers, ctx.lengths)


_merge_heads.register_autograd(_merge_backward, setup_context=_merge_setup)


@fused_operator("octic_attention")
def _attention(
    qkv: Tensor, bias: Tensor | None, heads: int, numbers: list[int], lengths: list[int]
) -> tuple[Tensor, Tensor]:
    shapes = _shapes(numbers, lengths)
    return kernels(qkv, "attention").attention_forward(qkv.contiguous(), bias, heads, shapes)


@_attention.register_fake
def _(qkv, bias, heads, numbers, lengths):
    tokens, channels = qkv.shape
    lse = qkv.new_empty(tokens * heads, dtype=torch.float32)
    return qkv.new_empty(tokens, channels // 3), lse


@fused_operator("octic_attention_grad")
def _attention_grad(
    grad: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    heads: int,
    numbers: list[int],
    lengths: list[int],
) -> Tensor:
    shapes = _shapes(numbers, lengths)
    return kernels(qkv, "attention").attention_backward(
        grad.contiguous(), qkv.contiguous(), bias, out, lse, heads, shapes
    )


@_attention_grad.register_fake
def _(grad, qkv, bias, out, lse, heads, numbers, lengths):
    return qkv.new_empty(qkv.shape)


def _setup(ctx, inputs, output):
    qkv, bias, *ctx.sizes = inputs
    ctx.save_for_backward(qkv, bias, *output)


def _backward(ctx, grad, _):
    qkv, bias, out, lse = ctx.saved_tensors
    grad_qkv = _attention_grad(grad, qkv, bias, out, lse, *ctx.sizes)
    grad_bias = grad_qkv[:, : bias.shape[0]].sum(0) if ctx.needs_input_grad[1] else None
    return grad_qkv, grad_bias, None, None, None


_attention.register_autograd(_backward, setup_context=_setup)


# ---------------------------------------------------------------------- with the linear map, for heads of 64


@closed_operator("octic_self_attention")
def _self_attention(
    x: Tensor,
    weight_1: Tensor,
    weight_2: Tensor,
    bias: Tensor | None,
    heads: int,
    numbers: list[int],
    lengths: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and for the gradients q, k and v in runs and the log-sum-exp of the scores."""
    from quickvit.ops.triton.attention import attention_forward

    piece = x.shape[1] // (D8.order * heads)
    qkv = hopper.kernels().linear_heads(x, weight_1, weight_2, bias, piece)
    out, lse = attention_forward(qkv, None, heads, _shapes(numbers, lengths), runs=True)
    return out, qkv, lse


@_self_attention.register_fake
def _(x, weight_1, weight_2, bias, heads, numbers, lengths):
    tokens, channels = x.shape
    lse = x.new_empty(tokens * heads, dtype=torch.float32)
    return x.new_empty(tokens, channels), x.new_empty(tokens, 3 * channels), lse


@closed_operator("octic_self_attention_qkv_grad")
def _qkv_grad(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, numbers: list[int], lengths: list[int]
) -> Tensor:
    """The gradient of q, k and v, packed."""
    from quickvit.ops.triton.attention import attention_backward

    shapes = _shapes(numbers, lengths)
    return attention_backward(grad.contiguous(), qkv, None, out, lse, heads, shapes, runs=True)


@_qkv_grad.register_fake
def _(grad, qkv, out, lse, heads, numbers, lengths):
    return torch.empty_like(qkv)


def _self_setup(ctx, inputs, output):
    x, weight_1, weight_2, bias, *ctx.sizes = inputs
    out, qkv, lse = output
    ctx.save_for_backward(x, weight_1, weight_2, out, qkv, lse)
    ctx.mark_non_differentiable(qkv, lse)
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = x.dtype if bias is None else bias.dtype


def _self_backward(ctx, grad, *_):
    x, weight_1, weight_2, out, qkv, lse = ctx.saved_tensors
    grad_qkv = _qkv_grad(grad, qkv, out, lse, *ctx.sizes)
    grads = all_grads(ctx.needs_input_grad, grad_qkv, x, weight_1, weight_2, ctx.bias_dtype)
    return *grads, None, None, None


_self_attention.register_autograd(_self_backward, setup_context=_self_setup)


# ---------------------------------------------------------------------- the same for heads of 80


@closed_operator("octic_head_attention")
def _head_attention(
    x: Tensor,
    weight_1: Tensor,
    weight_2: Tensor,
    bias: Tensor | None,
    heads: int,
    numbers: list[int],
    lengths: list[int],
) -> list[Tensor]:
    """The result, and what gradients need of each batch.

    Of a short one that is packed qkv, of others q, k, v [3, B, N, H, D], their result [B, N, H, D] and the logarithms
    of sums [B, H, N].
    """
    from quickvit.ops.triton.heads import to_packed
    from quickvit.ops.triton.whole_head import SHORT, attention_of_batch

    out, kept = x.new_empty(x.shape), []
    for origin, shape in _batches(numbers, lengths):
        tokens = slice(origin, origin + shape[0] * shape[1])
        if shape[1] <= SHORT:
            qkv = x.new_empty(tokens.stop - origin, 3 * x.shape[1])
            products(x[tokens], weight_1, weight_2, qkv)
            attention_of_batch(qkv, bias, out[tokens], heads, shape, 0)
            kept.append(qkv)
        else:
            qkv = hopper.heads_kernels().linear_heads(x[tokens], weight_1, weight_2, bias).unflatten(1, shape)
            result, logs = hopper.attention_kernels().attention_forward(*qkv, pairs=True)
            to_packed([result], out, origin, pairs=True)
            kept += [qkv, result, logs]
    return [out, *kept]


@_head_attention.register_fake
def _(x, weight_1, weight_2, bias, heads, numbers, lengths):
    from quickvit.ops.triton.whole_head import SHORT

    kept = []
    for number, length in _shapes(numbers, lengths):
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
    for origin, shape in _batches(numbers, lengths):
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
    x, weight_1, weight_2, bias, *ctx.sizes = inputs
    ctx.save_for_backward(x, weight_1, weight_2, bias, *output[1:])
    ctx.set_materialize_grads(False)


def _head_backward(ctx, grads):
    x, weight_1, weight_2, bias, *kept = ctx.saved_tensors
    grad_qkv = _heads_grad(grads[0], kept, bias, *ctx.sizes)
    dtype = x.dtype if bias is None else bias.dtype
    return *all_grads(ctx.needs_input_grad, grad_qkv, x, weight_1, weight_2, dtype), None, None, None


_head_attention.register_autograd(_head_backward, setup_context=_head_setup)


def _shapes(numbers: list[int], lengths: list[int]) -> Shapes:
    return tuple(zip(numbers, lengths, strict=True))


def _batches(numbers: list[int], lengths: list[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """The first token and the shape of each batch."""
    origin = 0
    for number, length in _shapes(numbers, lengths):
        yield origin, (number, length)
        origin += number * length


def _new_heads(packed, heads, parts, numbers, lengths):
    dim = packed.shape[1] // (parts * heads)
    shapes = _shapes(numbers, lengths)
    return [packed.new_empty(*shape, heads, dim) for shape in shapes for _ in range(parts)]


def _new_packed(features: list[Tensor], parts: int) -> Tensor:
    tokens = sum(x.shape[0] * x.shape[1] for x in features) // parts
    return features[0].new_empty(tokens, parts * features[0].shape[2] * features[0].shape[3])


_ops = torch.ops.quickvit


@register_flop_formula([_ops.octic_attention, _ops.octic_attention_cpu, _ops.octic_whole_heads])
def _attention_flops(qkv, bias, heads, numbers, lengths, **__):
    return 4 * _pairs(numbers, lengths) * (qkv[1] // 3)


@register_flop_formula([_ops.octic_self_attention, _ops.octic_head_attention])
def _self_attention_flops(x, weight_1, weight_2, bias, heads, numbers, lengths, **__):
    _, rows, columns = weight_1
    return 2 * x[0] * 12 * rows * columns + 4 * _pairs(numbers, lengths) * x[1]


@register_flop_formula(_ops.octic_attention_of_heads)
def _attention_of_heads_flops(q, *_, **__):
    number, length, heads, dim = q
    return 4 * number * length**2 * heads * dim


@register_flop_formula(_ops.octic_self_attention_qkv_grad)
def _qkv_grad_flops(grad, qkv, out, lse, heads, numbers, lengths, **__):
    return 10 * _pairs(numbers, lengths) * grad[1]


@register_flop_formula(_ops.octic_head_attention_qkv_grad)
def _heads_grad_flops(grad, kept, bias, heads, numbers, lengths, **__):
    return 10 * _pairs(numbers, lengths) * grad[1]


@register_flop_formula([_ops.octic_attention_grad, _ops.octic_attention_grad_cpu])
def _attention_grad_flops(grad, qkv, bias, out, lse, heads, numbers, lengths, **__):
    return 10 * _pairs(numbers, lengths) * grad[1]


def _pairs(numbers: list[int], lengths: list[int]) -> int:
    """Pairs of a query and a key."""
    return sum(number * length**2 for number, length in _shapes(numbers, lengths))
