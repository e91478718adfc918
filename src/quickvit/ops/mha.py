"""Multi-head attention in one step, with the linear maps before and after it: for inference on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quickvit.group import D8, DihedralGroup, Layout
from quickvit.ops.attention import octic_attention, octic_self_attention, pairs, takes_self_attention
from quickvit.ops.backend import fused, needs_grad
from quickvit.ops.linear import octic_linear, products
from quickvit.ops.operator import closed_operator
from quickvit.ops.packing import Shapes, places
from quickvit.ops.precision import autocast

# Bytes of q, k and v that exist at one time: enough to keep a GPU busy.
QKV_BYTES = 96 * 2**20


def takes_mha(x: Tensor, group: DihedralGroup, *parameters: Tensor | None) -> bool:
    """Whether `octic_mha` is there for x: where kernels are on a GPU, and no gradient needs q, k and v."""
    return x.is_cuda and fused(x, group) and not needs_grad(x, *parameters)


def octic_mha(
    x: Tensor,
    qkv_1: Tensor,
    qkv_2: Tensor,
    bias: Tensor | None,
    proj_1: Tensor,
    proj_2: Tensor,
    heads: int,
    *,
    shapes: Shapes | None = None,
    overwrite: bool = False,
) -> Tensor:
    """W₂ MHA(W₁ x + b), [B, N, C] → [B, N, C], without the bias of the second map; see `octic_linear`.

    q, k and v, and what they are copied to, exist of some sequences at a time. Packed sequences [T, C] come with
    their `shapes`. With `overwrite` the caller has no more use for x, and it holds the result.
    """
    x, qkv_1, qkv_2, proj_1, proj_2 = autocast(x, qkv_1, qkv_2, proj_1, proj_2)
    numbers, lengths = ([*sizes] for sizes in zip(*(shapes or (x.shape[:2],)), strict=True))
    rest = qkv_1, qkv_2, bias, proj_1, proj_2, heads, numbers, lengths
    if overwrite and x.is_contiguous():
        _mha_into(x.flatten(0, -2), *rest)
        return x
    y: Tensor = _mha(x.flatten(0, -2), *rest)
    return y.unflatten(0, x.shape[:-1])


@closed_operator("octic_mha")
def _mha(
    x: Tensor,
    qkv_1: Tensor,
    qkv_2: Tensor,
    bias: Tensor | None,
    proj_1: Tensor,
    proj_2: Tensor,
    heads: int,
    numbers: list[int],
    lengths: list[int],
) -> Tensor:
    x = x.contiguous()
    y = torch.empty_like(x)
    in_parts(x, y, (qkv_1, qkv_2), bias, (proj_1, proj_2), heads, (*zip(numbers, lengths, strict=True),))
    return y


@closed_operator("octic_mha_", mutates_args=("x",))
def _mha_into(
    x: Tensor,
    qkv_1: Tensor,
    qkv_2: Tensor,
    bias: Tensor | None,
    proj_1: Tensor,
    proj_2: Tensor,
    heads: int,
    numbers: list[int],
    lengths: list[int],
) -> None:
    in_parts(x, x, (qkv_1, qkv_2), bias, (proj_1, proj_2), heads, (*zip(numbers, lengths, strict=True),))


def in_parts(
    x: Tensor,
    y: Tensor,
    qkv: tuple[Tensor, Tensor],
    bias: Tensor | None,
    proj: tuple[Tensor, Tensor],
    heads: int,
    shapes: Shapes,
) -> None:
    """Attention of x written to y, which may be x: of some sequences after the others."""
    for tokens, part in _parts(shapes, 3 * x.shape[1] * x.element_size()):
        products(_attend(x[tokens], qkv, bias, heads, part), *proj, y[tokens])


def _parts(shapes: Shapes, size: int) -> Iterator[tuple[slice, Shapes]]:
    """Which tokens are a part, and the shapes of its sequences; q, k and v of a token have this size."""
    total = sum(number * length for number, length in shapes)
    if total * size <= QKV_BYTES:
        yield slice(total), shapes
        return
    for origin, number, length in places(shapes):
        most = max(QKV_BYTES // (length * size), 1)
        parts = -(-number // most)
        step = -(-number // parts)
        for first in range(0, number, step):
            count = min(step, number - first)
            begin = origin + first * length
            yield slice(begin, begin + count * length), ((count, length),)


def _attend(x: Tensor, qkv: tuple[Tensor, Tensor], bias: Tensor | None, heads: int, shapes: Shapes) -> Tensor:
    if takes_self_attention(x, heads, D8):
        return octic_self_attention(x, *qkv, bias, heads, shapes=shapes)
    return octic_attention(octic_linear(x, *qkv), heads, Layout(3 * x.shape[1]), bias, shapes=shapes)


@_mha.register_fake
def _(x, qkv_1, qkv_2, bias, proj_1, proj_2, heads, numbers, lengths):
    return x.new_empty(x.shape)


@_mha_into.register_fake
def _(x, qkv_1, qkv_2, bias, proj_1, proj_2, heads, numbers, lengths):
    return None


@register_flop_formula([torch.ops.quickvit.octic_mha, torch.ops.quickvit.octic_mha_])
def _mha_flops(x, qkv_1, qkv_2, bias, proj_1, proj_2, heads, numbers, lengths, **__) -> int:
    tokens, channels = x
    _, rows, columns = qkv_1
    maps = 12 * (rows * columns + proj_1[1] * proj_1[2])
    return 2 * tokens * maps + 4 * pairs(numbers, lengths) * channels
