"""The attention of a block in one step: queries, keys and values, heads, and the linear map after them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quickvit.group import D8, DihedralGroup
from quickvit.ops.backend import autocast, fused, needs_grad
from quickvit.ops.linear import products


def takes_self_attention(x: Tensor, heads: int, group: DihedralGroup, *parameters: Tensor | None) -> bool:
    """Whether `octic_self_attention` is there for x: 16-bit types on a GPU from Hopper on, without gradients."""
    if x.is_cpu or x.ndim != 3 or not fused(x, group) or needs_grad(x, *parameters):
        return False
    if x.element_size() != 2 or not x.numel() or torch.cuda.get_device_capability(x.device) < (9, 0):
        return False
    from quickvit.ops.triton.channels_first import TILES

    return x.shape[-1] // (D8.order * heads) in TILES


def octic_self_attention(
    x: Tensor, qkv_1: Tensor, qkv_2: Tensor, bias: Tensor | None, proj_1: Tensor, proj_2: Tensor, heads: int
) -> Tensor:
    """W_o softmax(q kᵀ / √D) v with (q, k, v) = W x + b, [B, N, C] → [B, N, C], without the bias of the last map.

    See `octic_linear` and `octic_attention`. What lies between the products is transposed, a row for each channel:
    cuBLAS writes and reads it as fast, and attention reads it faster.
    """
    x, qkv_1, qkv_2, proj_1, proj_2 = autocast(x, qkv_1, qkv_2, proj_1, proj_2)
    number, length, _ = x.shape
    y = _self_attention(x.flatten(0, 1), qkv_1, qkv_2, bias, proj_1, proj_2, heads, number, length)
    return y.unflatten(0, (number, length))


@torch.library.custom_op("quickvit::octic_self_attention", mutates_args=(), device_types="cuda")
def _self_attention(
    x: Tensor,
    qkv_1: Tensor,
    qkv_2: Tensor,
    bias: Tensor | None,
    proj_1: Tensor,
    proj_2: Tensor,
    heads: int,
    number: int,
    length: int,
) -> Tensor:
    return in_rows(x.contiguous(), qkv_1, qkv_2, bias, proj_1, proj_2, heads, number, length)


def in_rows(
    x: Tensor,
    qkv_1: Tensor,
    qkv_2: Tensor,
    bias: Tensor | None,
    proj_1: Tensor,
    proj_2: Tensor,
    heads: int,
    number: int,
    length: int,
) -> Tensor:
    """The three steps, on tokens [T, C]."""
    from quickvit.ops.triton.channels_first import ALIGNMENT, attention_channels_first

    tokens, width = x.shape
    room = -(-tokens // ALIGNMENT) * ALIGNMENT
    qkv = x.new_empty(3 * width, room)
    products(x, qkv_1, qkv_2, qkv[:, :tokens].T)
    rows = attention_channels_first(qkv, bias, heads, number, length)
    y = torch.empty_like(x)
    products(rows[:, :tokens].T, proj_1, proj_2, y)
    return y


@_self_attention.register_fake
def _(x, qkv_1, qkv_2, bias, proj_1, proj_2, heads, number, length):
    return x.new_empty(x.shape)


@register_flop_formula(torch.ops.quickvit.octic_self_attention)
def _self_attention_flops(x, qkv_1, qkv_2, bias, proj_1, proj_2, heads, number, length, **__) -> int:
    tokens, width = x
    return 2 * tokens * 12 * (width // 8) ** 2 * 4 + 4 * number * length**2 * width
