"""Multi-head self-attention on packed channels.

qkv [B, N, 3C] is the packed result of an octic linear map; in each of its blocks the channels run over
(q k v, head, channel). A head of size D = C/H collects its channels of all blocks, so that every head holds a
multiple of ρ_iso and its logits are invariant.

Sequences of several lengths come packed too, see `packing`. Operators read and write tokens [T, ...] and are told
the shapes as two lists: each batch has its place in the one result, and in the one gradient, and nothing is copied.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quickvit.group import D8, Layout
from quickvit.ops import hopper
from quickvit.ops.backend import fused, needs_grad
from quickvit.ops.heads import into_heads, merge_heads, split_heads
from quickvit.ops.operator import closed_operator, fused_operator, kernels, open_operator, seen
from quickvit.ops.packing import Shapes, as_shapes, attend, pack, pairs, unpack
from quickvit.ops.rows import lines, require_length


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
    require_length(layout.copies, bias=bias)
    (bias,) = lines(bias)
    if not dropout and _reads_packed(qkv, heads):
        return _attention(qkv, bias, heads, numbers, lengths)[0]
    if not dropout and _fits_whole_heads(qkv, bias, heads, max(lengths)):
        return _whole_heads(qkv, bias, heads, numbers, lengths)
    if overwrite and qkv.is_contiguous() and not seen(qkv, bias):
        q, k, v = (unpack(x, shapes) for x in into_heads(qkv, heads, bias))
        batches = zip(q, k, v, strict=True)
    else:
        features = split_heads(qkv, bias, heads, numbers, lengths)
        batches = zip(features[::3], features[1::3], features[2::3], strict=True)
    return merge_heads([_attend(*batch, dropout) for batch in batches])


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

    return attention_whole_head(qkv.contiguous(), bias, heads, as_shapes(numbers, lengths))


@fused_operator("octic_attention")
def _attention(
    qkv: Tensor, bias: Tensor | None, heads: int, numbers: list[int], lengths: list[int]
) -> tuple[Tensor, Tensor]:
    shapes = as_shapes(numbers, lengths)
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
    shapes = as_shapes(numbers, lengths)
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


_ops = torch.ops.quickvit


@register_flop_formula([_ops.octic_attention, _ops.octic_attention_cpu, _ops.octic_whole_heads])
def _attention_flops(qkv, bias, heads, numbers, lengths, **__):
    return 4 * pairs(numbers, lengths) * (qkv[1] // 3)


@register_flop_formula(_ops.octic_attention_of_heads)
def _attention_of_heads_flops(q, *_, **__):
    number, length, heads, dim = q
    return 4 * number * length**2 * heads * dim


@register_flop_formula([_ops.octic_attention_grad, _ops.octic_attention_grad_cpu])
def _attention_grad_flops(grad, qkv, bias, out, lse, heads, numbers, lengths, **__):
    return 10 * pairs(numbers, lengths) * grad[1]
