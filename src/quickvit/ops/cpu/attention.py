"""Attention on packed channels, see attention.c."""

from __future__ import annotations

import torch
from torch import Tensor

from quickvit.ops.cpu.library import call, checked, scratch
from quickvit.ops.packing import Shapes, places


def attention_forward(qkv: Tensor, bias: Tensor | None, heads: int, shapes: Shapes) -> tuple[Tensor, Tensor]:
    """Attention over packed qkv[T, 3C] with the A1 bias[3C/8] of q, k, v, in sequences of these shapes.

    Returns o[T, C], packed, and the log-sum-exp of the scaled scores in base 2, lse[T H], of each batch [B, H, N].
    """
    tokens, channels = qkv.shape
    c = _copies_per_head(channels, heads)
    bias = checked(bias, channels // 8)
    out, lse = qkv.new_empty(tokens, channels // 3), qkv.new_empty(tokens * heads)
    for first, number, length in places(shapes):
        memory, threads = scratch("attention_scratch", length, c)
        call(
            "attention_forward",
            qkv[first:],
            bias,
            out[first:],
            lse[first * heads :],
            memory,
            number,
            length,
            heads,
            c,
            threads=threads,
        )
    return out, lse


def attention_backward(
    dout: Tensor, qkv: Tensor, bias: Tensor | None, out: Tensor, lse: Tensor, heads: int, shapes: Shapes
) -> Tensor:
    """Gradient dqkv[T, 3C] of `attention_forward`, packed; the bias's is the sum of its A1 columns."""
    tokens, channels = qkv.shape
    c = _copies_per_head(channels, heads)
    dout, out = checked(dout, tokens, channels // 3), checked(out, tokens, channels // 3)
    bias, lse = checked(bias, channels // 8), checked(lse, tokens * heads)
    dqkv = torch.empty_like(qkv)
    for first, number, length in places(shapes):
        memory, threads = scratch("attention_grad_scratch", length, c)
        call(
            "attention_backward",
            dout[first:],
            qkv[first:],
            bias,
            out[first:],
            lse[first * heads :],
            dqkv[first:],
            memory,
            number,
            length,
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
