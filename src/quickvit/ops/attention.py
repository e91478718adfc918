"""Multi-head self-attention on packed channels.

qkv [B, N, 3C] is the packed result of an octic linear map; in each of its blocks the channels run over
(q k v, head, channel). A head of size D = C/H collects its channels of all blocks, so that every head holds a
multiple of ρ_iso and its logits are invariant.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

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
