"""Packed channels to attention heads and back, each in one pass.

A packed tensor [T, P C] holds P features (q, k and v, or one) in every block: A1, A2, B1, B2 run over
(feature, head, c) with c = C/8/H, the two components of E over (feature, head, 2c). Features in heads are P tensors
[T, H, D]; a head's D = 8c entries are its pieces of the six blocks, one after the other.
"""

import math

import torch
import triton
import triton.language as tl

# Entries per program and warps. Programs write runs of memory and gather what they read: the other way round, runs
# of a few bytes would be written into lines that several programs share.
TILE: tuple[int, int] = (1024, 4)


@triton.jit
def _flat(T, M: tl.constexpr, BLOCK: tl.constexpr):
    """Token and entry of this program's part of a [T, 8 M] feature; divisions per entry stay in 32 bits."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    # Eight entries in a row belong to one token; the compiler needs the hint to move them together.
    flat = tl.multiple_of((start % (8 * M)).to(tl.int32), 8) + tl.arange(0, BLOCK)
    token = start // (8 * M) + flat // (8 * M)
    return token, flat % (8 * M), start + tl.arange(0, BLOCK), token < T


@triton.jit(do_not_specialize=["T"])
def _to_heads(
    packed,
    bias,
    feature,
    T,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    M: tl.constexpr,
    c: tl.constexpr,
    VEC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Entry (token, head, d) of a feature from its packed column, plus the bias of A1."""
    token, entry, index, mask = _flat(T, M, BLOCK)
    head, d = entry // (8 * c), entry % (8 * c)
    e = d - 4 * c
    place = tl.where(e < 0, head * c + d % c, head * (2 * c) + e % (2 * c))
    block = tl.where(e < 0, d // c, 4 + 2 * (e // (2 * c)))
    column = block * (PARTS * M) + PART * tl.where(e < 0, M, 2 * M) + place
    column = tl.max_contiguous(tl.multiple_of(column, VEC), VEC)
    value = tl.load(packed + token * (8 * PARTS * M) + column, mask=mask)
    if bias is not None:
        shift = tl.load(bias + PART * M + place, mask=block == 0, other=0.0)
        value = (value.to(tl.float32) + shift.to(tl.float32)).to(value.dtype)
    tl.store(feature + index, value, mask=mask)


@triton.jit(do_not_specialize=["T"])
def _to_packed(
    feature,
    packed,
    T,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    M: tl.constexpr,
    c: tl.constexpr,
    VEC: tl.constexpr,
    RUN: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Packed column from the entry (token, head, d) of a feature."""
    token, f, _, mask = _flat(T, M, BLOCK)
    e = f - 4 * M
    width = tl.where(e < 0, M, 2 * M)
    piece = tl.where(e < 0, c, 2 * c)
    block = tl.where(e < 0, f // M, 4 + 2 * (e // (2 * M)))
    place = tl.where(e < 0, f % M, e % (2 * M))
    column = block * (PARTS * M) + PART * width + place
    column = tl.max_contiguous(tl.multiple_of(column, RUN), RUN)
    entry = (place // piece) * (8 * c) + block * c + place % piece
    entry = tl.max_contiguous(tl.multiple_of(entry, VEC), VEC)
    value = tl.load(feature + token * (8 * M) + entry, mask=mask)
    tl.store(packed + token * (8 * PARTS * M) + column, value, mask=mask)


def to_heads(packed: torch.Tensor, heads: int, parts: int, bias: torch.Tensor | None) -> list[torch.Tensor]:
    """The `parts` features of packed[T, parts · C] as tensors [T, H, D], with the A1 bias[parts · C/8] added."""
    tokens = packed.shape[0]
    m = packed.shape[1] // (8 * parts)
    c = m // heads
    features = [packed.new_empty(tokens, heads, 8 * c) for _ in range(parts)]
    block, warps = TILE
    if tokens:
        # One launch per feature: a pointer chosen inside the kernel would lose its alignment.
        with torch.cuda.device_of(packed):
            for part, feature in enumerate(features):
                _to_heads[(triton.cdiv(feature.numel(), block),)](
                    packed, bias, feature, tokens, part, parts, m, c, math.gcd(c, 8), block, num_warps=warps
                )
    return features


def to_packed(features: list[torch.Tensor]) -> torch.Tensor:
    """The inverse of `to_heads`: features [T, H, D] to packed[T, parts · C]."""
    parts = len(features)
    tokens, heads, dim = features[0].shape
    packed = features[0].new_empty(tokens, parts * heads * dim)
    m, c = heads * dim // 8, dim // 8
    block, warps = TILE
    if tokens:
        with torch.cuda.device_of(packed):
            for part, feature in enumerate(features):
                _to_packed[(triton.cdiv(feature.numel(), block),)](
                    feature,
                    packed,
                    tokens,
                    part,
                    parts,
                    m,
                    c,
                    math.gcd(c, 8),
                    math.gcd(m, 8),
                    block,
                    num_warps=warps,
                )
    return packed
