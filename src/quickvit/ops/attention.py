"""Multi-head self-attention on packed channels.

qkv [B, N, 3C] is the packed result of an octic linear map; in each of its blocks the channels run over
(q k v, head, channel). A head of size D = C/H collects its channels of all blocks, so that every head holds a
multiple of ρ_iso and its logits are invariant.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.flop_counter import register_flop_formula

from quickvit.group import D8, Layout
from quickvit.ops.backend import fused, needs_grad
from quickvit.ops.operator import fused_operator, kernels


def octic_attention(
    qkv: Tensor, heads: int, layout: Layout, bias: Tensor | None = None, *, dropout: float = 0.0
) -> Tensor:
    """softmax(q kᵀ / √D) v for every head, [B, N, 3C] → [B, N, C]; `bias` [3C/|G|] is added to A1 first.

    `layout` is that of qkv.
    """
    if not fused(qkv, layout.group) or (dropout and qkv.is_cpu):
        return definition(qkv, heads, layout, bias, dropout=dropout)
    if not dropout and _reads_packed(qkv, heads):
        return _attention(qkv, bias, heads)[0]
    if not dropout and _fits_whole_heads(qkv, bias, heads):
        return _whole_heads(qkv, bias, heads)
    q, k, v = (t.transpose(1, 2) for t in _split_heads(qkv, bias, heads))
    out = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    return _merge_heads(out.transpose(1, 2))


def definition(
    qkv: Tensor, heads: int, layout: Layout, bias: Tensor | None = None, *, dropout: float = 0.0
) -> Tensor:
    """The same with `scaled_dot_product_attention`, the channels copied into heads and back."""
    blocks = qkv.split([block.width for block in layout.blocks], dim=-1)
    pieces = [block.unflatten(-1, (3, heads, -1)) for block in blocks]
    if bias is not None:
        pieces[0] = pieces[0] + bias.unflatten(0, (3, heads, -1))
    q, k, v = torch.cat(pieces, dim=-1).permute(2, 0, 3, 1, 4)
    out = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2)
    parts = out.split([piece.shape[-1] for piece in pieces], dim=-1)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)


def _reads_packed(qkv: Tensor, heads: int) -> bool:
    """Whether a kernel that reads packed channels takes these heads: on a GPU, pieces of 16 or 32 bytes, aligned."""
    if qkv.is_cpu:
        return True
    return qkv.element_size() == 2 and qkv.shape[-1] // (3 * D8.order * heads) in (8, 16)


def _fits_whole_heads(qkv: Tensor, bias: Tensor | None, heads: int) -> bool:
    """Whether the kernel that keeps a head's keys and values takes these; it has no gradient."""
    from quickvit.ops.triton.whole_head import takes

    dim = qkv.shape[2] // (3 * heads)
    return qkv.element_size() == 2 and not needs_grad(qkv, bias) and takes(qkv.shape[1], dim)


@torch.library.triton_op("quickvit::octic_whole_heads", mutates_args=())
def _whole_heads(qkv: Tensor, bias: Tensor | None, heads: int) -> Tensor:
    from quickvit.ops.triton.whole_head import attention_whole_head

    return attention_whole_head(qkv.contiguous(), bias, heads)


@torch.library.triton_op("quickvit::octic_split_heads", mutates_args=())
def _split_heads(qkv: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    from quickvit.ops.triton.heads import to_heads

    q, k, v = to_heads(qkv.contiguous().flatten(0, 1), heads, 3, bias)
    return tuple(t.unflatten(0, qkv.shape[:2]) for t in (q, k, v))


@_split_heads.register_fake
def _(qkv, bias, heads):
    shape = (*qkv.shape[:2], heads, qkv.shape[2] // (3 * heads))
    return qkv.new_empty(shape), qkv.new_empty(shape), qkv.new_empty(shape)


@torch.library.triton_op("quickvit::octic_split_heads_grad", mutates_args=())
def _split_heads_grad(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from quickvit.ops.triton.heads import to_packed

    return to_packed([t.contiguous().flatten(0, 1) for t in (q, k, v)]).unflatten(0, q.shape[:2])


@_split_heads_grad.register_fake
def _(q, k, v):
    return q.new_empty(*q.shape[:2], 3 * q.shape[2] * q.shape[3])


def _split_setup(ctx, inputs, output):
    _, bias, _ = inputs
    ctx.bias_width = None if bias is None else bias.shape[0]


def _split_backward(ctx, q, k, v):
    grad = _split_heads_grad(q, k, v)
    return grad, None if ctx.bias_width is None else grad[..., : ctx.bias_width].sum((0, 1)), None


_split_heads.register_autograd(_split_backward, setup_context=_split_setup)


@torch.library.triton_op("quickvit::octic_merge_heads", mutates_args=())
def _merge_heads(x: Tensor) -> Tensor:
    from quickvit.ops.triton.heads import to_packed

    return to_packed([x.contiguous().flatten(0, 1)]).unflatten(0, x.shape[:2])


@_merge_heads.register_fake
def _(x):
    return x.new_empty(*x.shape[:2], x.shape[2] * x.shape[3])


@torch.library.triton_op("quickvit::octic_merge_heads_grad", mutates_args=())
def _merge_heads_grad(grad: Tensor, heads: int) -> Tensor:
    from quickvit.ops.triton.heads import to_heads

    return to_heads(grad.contiguous().flatten(0, 1), heads, 1, None)[0].unflatten(0, grad.shape[:2])


@_merge_heads_grad.register_fake
def _(grad, heads):
    return grad.new_empty(*grad.shape[:2], heads, grad.shape[2] // heads)


def _merge_setup(ctx, inputs, output):
    ctx.heads = inputs[0].shape[2]


def _merge_backward(ctx, grad):
    return _merge_heads_grad(grad, ctx.heads)


_merge_heads.register_autograd(_merge_backward, setup_context=_merge_setup)


@fused_operator("octic_attention")
def _attention(qkv: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    return kernels(qkv, "attention").attention_forward(qkv.contiguous(), bias, heads)


@_attention.register_fake
def _(qkv, bias, heads):
    batch, tokens, channels = qkv.shape
    lse = qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
    return qkv.new_empty(batch, tokens, channels // 3), lse


@fused_operator("octic_attention_grad")
def _attention_grad(
    grad: Tensor, qkv: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, heads: int
) -> Tensor:
    return kernels(qkv, "attention").attention_backward(
        grad.contiguous(), qkv.contiguous(), bias, out, lse, heads
    )


@_attention_grad.register_fake
def _(grad, qkv, bias, out, lse, heads):
    return qkv.new_empty(qkv.shape)


def _setup(ctx, inputs, output):
    qkv, bias, ctx.heads = inputs
    ctx.save_for_backward(qkv, bias, *output)


def _backward(ctx, grad, _):
    qkv, bias, out, lse = ctx.saved_tensors
    grad_qkv = _attention_grad(grad, qkv, bias, out, lse, ctx.heads)
    return grad_qkv, None if bias is None else grad_qkv[..., : bias.shape[0]].sum((0, 1)), None


_attention.register_autograd(_backward, setup_context=_setup)


_ops = torch.ops.quickvit


@register_flop_formula([_ops.octic_attention, _ops.octic_attention_cpu, _ops.octic_whole_heads])
def _attention_flops(qkv, *_, **__):
    batch, tokens, channels = qkv
    return 4 * batch * tokens**2 * (channels // 3)


@register_flop_formula([_ops.octic_attention_grad, _ops.octic_attention_grad_cpu])
def _attention_grad_flops(grad, *_, **__):
    batch, tokens, channels = grad
    return 10 * batch * tokens**2 * channels
