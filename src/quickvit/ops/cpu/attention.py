"""Attention on packed channels, see attention.c."""

from __future__ import annotations

import torch
from torch import Tensor

from quickvit.ops.cpu.library import call, checked, scratch


def attention_forward(qkv: Tensor, bias: Tensor | None, heads: int) -> tuple[Tensor, Tensor]:
    """Attention over packed qkv[B, N, 3C] with the A1 bias[3C/8] of q, k, v.

    Returns o[B, N, C], packed, and the log-sum-exp of the scaled scores in base 2, lse[B, H, N].
    """
    images, tokens, channels = qkv.shape
    c = _copies_per_head(channels, heads)
    out, lse = qkv.new_empty(images, tokens, channels // 3), qkv.new_empty(images, heads, tokens)
    memory, threads = scratch("attention_scratch", tokens, c)
    call(
        "attention_forward",
        qkv,
        checked(bias, channels // 8),
        out,
        lse,
        memory,
        images,
        tokens,
        heads,
        c,
        threads=threads,
    )
    return out, lse


def attention_backward(
    dout: Tensor, qkv: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, heads: int
) -> Tensor:
    """Gradient dqkv[B, N, 3C] of `attention_forward`, packed; the bias's is the sum of its A1 columns."""
    images, tokens, channels = qkv.shape
    c = _copies_per_head(channels, heads)
    shape = (images, tokens, channels // 3)
    dqkv = torch.empty_like(qkv)
    memory, threads = scratch("attention_grad_scratch", tokens, c)
    call(
        "attention_backward",
        checked(dout, *shape),
        qkv,
        checked(bias, channels // 8),
        checked(out, *shape),
        checked(lse, images, heads, tokens),
        dqkv,
        memory,
        images,
        tokens,
        heads,
        c,
        threads=threads,
    )
    return dqkv


def _copies_per_head(channels: int, heads: int) -> int:
    if channels % (24 * heads):
        raise ValueError(
            f"{channels} channels of q, k and v do not make {heads} heads of whole copies of ρ_iso"
        )
    return channels // (24 * heads)
