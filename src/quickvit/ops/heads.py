"""Packed channels copied into heads and back, where no kernel for attention reads them as they lie."""

from __future__ import annotations

from torch import Tensor

from quickvit.ops.operator import open_operator, straight, written
from quickvit.ops.packing import as_shapes, batches


@straight
def into_heads(qkv: Tensor, heads: int, bias: Tensor | None) -> Tensor:
    """q, k and v [3, T, H, D] in the place of qkv."""
    from quickvit.ops.triton import heads as kernels

    features = kernels.into_heads(qkv, heads, bias)
    written(qkv)
    return features


@open_operator("octic_split_heads")
def split_heads(
    qkv: Tensor, bias: Tensor | None, heads: int, numbers: list[int], lengths: list[int]
) -> list[Tensor]:
    """q, k and v [B, N, H, D] of each batch in turn."""
    from quickvit.ops.triton.heads import to_heads

    qkv = qkv.contiguous()
    origins = batches(numbers, lengths)
    return [x for origin, shape in origins for x in to_heads(qkv, heads, 3, bias, shape, origin)]


@split_heads.register_fake
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


split_heads.register_autograd(_split_backward, setup_context=_split_setup)


@open_operator("octic_merge_heads")
def merge_heads(features: list[Tensor]) -> Tensor:
    """The results [B, N, H, D] of all batches as packed channels."""
    return _to_packed(features, 1)


@merge_heads.register_fake
def _(features):
    return _new_packed(features, 1)


@open_operator("octic_merge_heads_grad")
def _merge_heads_grad(grad: Tensor, heads: int, numbers: list[int], lengths: list[int]) -> list[Tensor]:
    from quickvit.ops.triton.heads import to_heads

    grad = grad.contiguous()
    origins = batches(numbers, lengths)
    return [to_heads(grad, heads, 1, None, shape, origin)[0] for origin, shape in origins]


@_merge_heads_grad.register_fake
def _(grad, heads, numbers, lengths):
    return _new_heads(grad, heads, 1, numbers, lengths)


def _merge_setup(ctx, inputs, output):
    (features,) = inputs
    ctx.heads = features[0].shape[2]
    ctx.numbers, ctx.lengths = [x.shape[0] for x in features], [x.shape[1] for x in features]


def _merge_backward(ctx, grad):
    return _merge_heads_grad(grad, ctx.heads, ctx.numbers, ctx.lengths)


merge_heads.register_autograd(_merge_backward, setup_context=_merge_setup)


def _new_heads(packed, heads, parts, numbers, lengths):
    dim = packed.shape[1] // (parts * heads)
    shapes = as_shapes(numbers, lengths)
    return [packed.new_empty(*shape, heads, dim) for shape in shapes for _ in range(parts)]


def _new_packed(features: list[Tensor], parts: int) -> Tensor:
    tokens = sum(x.shape[0] * x.shape[1] for x in features) // parts
    return features[0].new_empty(tokens, parts * features[0].shape[2] * features[0].shape[3])
