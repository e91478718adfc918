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

from quickvit.group import D8, DihedralGroup, Layout
from quickvit.ops.backend import fused


def octic_attention(
    qkv: Tensor,
    heads: int,
    bias: Tensor | None = None,
    *,
    dropout: float = 0.0,
    group: DihedralGroup = D8,
) -> Tensor:
    """softmax(q kᵀ / √D) v for every head, [B, N, 3C] → [B, N, C]; `bias` [3C/|G|] is added to A1 first."""
    if dropout or not fused(qkv, group):
        return definition(qkv, heads, bias, dropout=dropout, group=group)
    out, _ = _attention(qkv, None if bias is None else bias.to(qkv.dtype), heads)
    return out


def definition(
    qkv: Tensor,
    heads: int,
    bias: Tensor | None = None,
    *,
    dropout: float = 0.0,
    group: DihedralGroup = D8,
) -> Tensor:
    """The same with `scaled_dot_product_attention`, the channels copied into heads and back."""
    layout = Layout(qkv.shape[-1], group)
    if bias is not None:
        qkv = qkv + layout.embed_invariant(bias)
    pieces = [qkv[..., b.slice].unflatten(-1, (3, heads, -1)) for b in layout.blocks]
    q, k, v = torch.cat(pieces, dim=-1).permute(2, 0, 3, 1, 4)
    out = functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2)
    parts = out.split([piece.shape[-1] for piece in pieces], dim=-1)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)


@torch.library.custom_op("quickvit::octic_attention", mutates_args=(), device_types="cuda")
def _attention(qkv: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    from quickvit.ops.triton.attention import attention_forward

    return attention_forward(qkv.contiguous(), bias, heads)


@_attention.register_fake
def _(qkv, bias, heads):
    batch, tokens, channels = qkv.shape
    lse = qkv.new_empty(batch, heads, tokens, dtype=torch.float32)
    return qkv.new_empty(batch, tokens, channels // 3), lse


@torch.library.custom_op("quickvit::octic_attention_grad", mutates_args=(), device_types="cuda")
def _attention_grad(
    grad: Tensor, qkv: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, heads: int
) -> Tensor:
    from quickvit.ops.triton.attention import attention_backward

    return attention_backward(grad.contiguous(), qkv.contiguous(), bias, out, lse, heads)


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


@register_flop_formula(torch.ops.quickvit.octic_attention)
def _attention_flops(qkv, *_, **__):
    batch, tokens, channels = qkv
    return 4 * batch * tokens**2 * (channels // 3)


@register_flop_formula(torch.ops.quickvit.octic_attention_grad)
def _attention_grad_flops(grad, *_, **__):
    batch, tokens, channels = grad
    return 10 * batch * tokens**2 * channels
