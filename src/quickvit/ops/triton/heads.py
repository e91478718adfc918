"""Packed channels to attention heads and back, each in one pass.

A packed tensor [T, P C] holds P features (q, k and v, or one) in every block: A1, A2, B1, B2 run over
(feature, head, c) with c = C/8/H, the two components of E over (feature, head, 2c). Its tokens are those of batches
of B sequences of N tokens. Features in heads are P tensors [B, N, H, D] for each batch; a head's D = 8c entries are
its pieces of the six blocks, one after the other. A launch moves a batch, which begins at token `origin`.

The kernels for Hopper have heads in pairs. A head's vector is eight pieces of c entries, two for each component of E,
and pairs of entries that have the same place in all pieces lie side by side: [c/2, 8, 2] instead of [8, c/2, 2]. The
products of attention do not see the order. But threads that hold two neighbours of each irrep can then write 32 bytes
at once, and memory takes smaller parts much more slowly. In what attention reads, the pieces have the order
0 2 4 6 1 3 5 7: its threads hold entries 2i, 2i + 1, 2i + 8 and 2i + 9 of a product, and write 0 to 7 side by side.

A program moves a run of entries of a few tokens: where the entries lie is worked out once for all of them.
Programs write runs of memory and gather what they read; the other way round, several programs would write
parts of the same lines. Neighbouring threads move neighbouring vectors, as wide as pieces of c entries are
aligned, so that an instruction of a warp meets few lines of the cache on either side.
"""

import math

import torch
import triton
import triton.language as tl

from quickvit.ops.tiles import tile
from quickvit.ops.triton.launch import traced

# Tokens per program and warps.
TILE: tuple[int, int] = (8, 8)
# The same where a program has all of a token.
TILE_IN_PLACE: tuple[int, int] = (2, 8)


@triton.jit
def block_of(place, UNIT: tl.constexpr):
    """Which of the eight blocks of UNIT entries the irrep's block at this place begins with: 0 1 2 3 4 6."""
    return tl.where(place < 4 * UNIT, place // UNIT, place // (2 * UNIT) * 2)


@triton.jit
def head_columns(
    head,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    c: tl.constexpr,
    START: tl.constexpr,
    SIZE: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Columns [1, SIZE] of a head's entries from START on, in one of the PARTS features that a token holds.

    VECTOR neighbours lie side by side, aligned.
    """
    d = START + tl.arange(0, SIZE)
    block = block_of(d, c)
    length = tl.where(d < 4 * c, c, 2 * c)
    column = block * (PARTS * HEADS * c) + (PART * HEADS + head) * length + d - block * c
    return tl.max_contiguous(tl.multiple_of(column, VECTOR), VECTOR)[None, :]


@triton.jit
def head_bias(bias, head, PART: tl.constexpr, HEADS: tl.constexpr, c: tl.constexpr, SIZE: tl.constexpr):
    """The A1 bias of one of q, k, v as a row [1, SIZE] over the first entries of a head's vector."""
    d = tl.arange(0, SIZE)
    return tl.load(bias + (PART * HEADS + head) * c + d, mask=d < c, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _of_pairs(entry, c: tl.constexpr):
    """Where in a head's pieces an entry is that attention has to find at this place of its pairs."""
    piece = entry % 8 // 2 * 2 + entry // 8 % 2
    return piece * c + entry // 16 * 2 + entry % 2


@triton.jit
def _in_pairs(d, c: tl.constexpr):
    """Where attention has written the entry that belongs to this place of a head's pieces."""
    return d % c // 2 * 16 + d // c * 2 + d % 2


@triton.jit
def _run(M: tl.constexpr, TOKENS: tl.constexpr, RUN: tl.constexpr):
    """This program's first token and its entries of a [T, 8 M] feature."""
    runs: tl.constexpr = (8 * M + RUN - 1) // RUN
    first = (tl.program_id(0) // runs).to(tl.int64) * TOKENS
    return first, tl.program_id(0) % runs * RUN + tl.arange(0, RUN)


@triton.jit
def _copy(
    source,
    read,
    target,
    write,
    shift,
    index,
    tokens,
    SOURCE: tl.constexpr,
    TARGET: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Entries `read` of tokens SOURCE apart to entries `write` of tokens TARGET apart, plus `shift`."""
    # All loads come before all stores: behind a store, which may touch what it reads, a load would wait.
    values = ()
    for token in tl.static_range(TOKENS):
        mask = index < tl.where(tokens > token, ENTRIES, 0)
        values += (tl.load(source + token * SOURCE + read, mask=mask),)
    for token in tl.static_range(TOKENS):
        value = values[token]
        if shift is not None:
            value = (value.to(tl.float32) + shift).to(value.dtype)
        mask = index < tl.where(tokens > token, ENTRIES, 0)
        tl.store(target + token * TARGET + write, value, mask=mask)


@triton.jit
def _piece_of(entry, c: tl.constexpr, PAIRS: tl.constexpr):
    """Of entries (head, d) of a feature: the block, how many pieces of c a head has there, and their place in it."""
    head, d = entry // (8 * c), entry % (8 * c)
    if PAIRS:
        d = _of_pairs(d, c)
    block = block_of(d, c)
    pieces = tl.where(d < 4 * c, 1, 2)
    return block, pieces, head * (pieces * c) + d - block * c


@triton.jit
def _column(piece, PART: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, VECTOR: tl.constexpr):
    """The packed columns of such entries in one of the PARTS features."""
    block, pieces, place = piece
    column = block * (PARTS * M) + pieces * (PART * M) + place
    return tl.max_contiguous(tl.multiple_of(column, VECTOR), VECTOR)


@triton.jit
def _shift(bias, piece, entry, PART: tl.constexpr, M: tl.constexpr):
    """What the bias adds to them."""
    block, _, place = piece
    invariant = (block == 0) & (entry < 8 * M)
    return tl.load(bias + PART * M + place, mask=invariant, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["origin", "T"])
def _to_heads(
    packed,
    bias,
    q,
    k,
    v,
    origin,
    T,
    M: tl.constexpr,
    c: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    RUN: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Entries (head, d) of the features from their packed columns, plus the bias of A1."""
    features = (q,) if k is None else (q, k, v)
    PARTS: tl.constexpr = len(features)
    first, entry = _run(M, TOKENS, RUN)
    piece = _piece_of(entry, c, PAIRS)
    shift = None
    for part in tl.static_range(PARTS):
        if bias is not None:
            shift = _shift(bias, piece, entry, part, M)
        _copy(
            packed + (origin + first) * (8 * PARTS * M),
            _column(piece, part, PARTS, M, VECTOR),
            features[part] + first * (8 * M),
            entry,
            shift,
            entry,
            (T - first).to(tl.int32),
            8 * PARTS * M,
            8 * M,
            8 * M,
            TOKENS,
        )


@triton.jit(do_not_specialize=["T"])
def _into_heads(
    packed,
    bias,
    T,
    M: tl.constexpr,
    c: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """q, k and v of a token one after the other, in heads, in the place of its packed columns."""
    first = tl.program_id(0).to(tl.int64) * TOKENS
    entry = tl.arange(0, SIZE)
    piece = _piece_of(entry, c, False)
    values = ()
    for part in tl.static_range(3):
        column = _column(piece, part, 3, M, VECTOR)
        if bias is not None:
            shift = _shift(bias, piece, entry, part, M)
        for token in tl.static_range(TOKENS):
            inside = entry < tl.where(first + token < T, 8 * M, 0)
            value = tl.load(packed + (first + token) * (24 * M) + column, mask=inside)
            if bias is not None:
                value = (value.to(tl.float32) + shift).to(value.dtype)
            values += (value,)
    # All of a token is read before anything is written.
    tl.debug_barrier()
    for part in tl.static_range(3):
        for token in tl.static_range(TOKENS):
            inside = entry < tl.where(first + token < T, 8 * M, 0)
            target = packed + (first + token) * (24 * M) + part * (8 * M) + entry
            tl.store(target, values[part * TOKENS + token], mask=inside)


@triton.jit(do_not_specialize=["origin", "T"])
def _to_packed(
    q,
    k,
    v,
    packed,
    origin,
    T,
    M: tl.constexpr,
    c: tl.constexpr,
    VECTOR: tl.constexpr,
    TOKENS: tl.constexpr,
    RUN: tl.constexpr,
    PAIRS: tl.constexpr,
):
    """Packed columns from the entries (head, d) of the features."""
    features = (q,) if k is None else (q, k, v)
    PARTS: tl.constexpr = len(features)
    first, index = _run(M, TOKENS, RUN)
    block = block_of(index, M)
    pieces = tl.where(index < 4 * M, 1, 2)
    place = index - block * M
    head = tl.where(index < 4 * M, place // c, place // (2 * c))
    d = block * c + place - head * (pieces * c)
    if PAIRS:
        d = _in_pairs(d, c)
    entry = head * (8 * c) + d
    entry = tl.max_contiguous(tl.multiple_of(entry, VECTOR), VECTOR)
    for part in tl.static_range(PARTS):
        column = block * (PARTS * M) + pieces * (part * M) + place
        column = tl.max_contiguous(tl.multiple_of(column, VECTOR), VECTOR)
        _copy(
            features[part] + first * (8 * M),
            entry,
            packed + (origin + first) * (8 * PARTS * M),
            column,
            None,
            index,
            (T - first).to(tl.int32),
            8 * M,
            8 * PARTS * M,
            8 * M,
            TOKENS,
        )


def _grid(
    kernel: str, x: torch.Tensor, tokens: int, m: int, c: int, pairs: bool = False
) -> tuple[tuple[int], dict[str, int]]:
    """Grid and specialisation of both kernels."""
    rows, warps = tile(kernel, (m, c, x.element_size()), x.device, TILE)
    vector = math.gcd(c, 2 if pairs else 16 // x.element_size())
    # One vector per thread and token: with more, a thread's vectors would lie side by side.
    run = 32 * warps * vector
    grid = (triton.cdiv(tokens, rows) * triton.cdiv(8 * m, run),)
    return grid, {"M": m, "c": c, "VECTOR": vector, "TOKENS": rows, "RUN": run, "num_warps": warps}


def to_heads(
    packed: torch.Tensor,
    heads: int,
    parts: int,
    bias: torch.Tensor | None,
    shape: tuple[int, int],
    origin: int,
    *,
    pairs: bool = False,
) -> list[torch.Tensor]:
    """The `parts` features [B, N, H, D] of a batch that begins at token `origin` of packed[T, parts · C].

    The A1 bias[parts · C/8] is added. With `pairs` they are what the kernels for Hopper read.
    """
    m, tokens = packed.shape[1] // (8 * parts), shape[0] * shape[1]
    size = (*shape, heads, 8 * m // heads)
    features = [torch.empty(size, dtype=packed.dtype, device=packed.device) for _ in range(parts)]
    if tokens:
        with torch.cuda.device_of(packed):
            grid, meta = _grid("to heads", packed, tokens, m, m // heads, pairs)
            traced(_to_heads)[grid](packed, bias, *_three(features), origin, tokens, **meta, PAIRS=pairs)
    return features


def into_heads(packed: torch.Tensor, heads: int, bias: torch.Tensor | None) -> torch.Tensor:
    """q, k and v [3, T, H, D] of packed[T, 3C], in its place, with the A1 bias[3C/8]."""
    tokens, m = len(packed), packed.shape[1] // 24
    if tokens:
        rows, warps = TILE_IN_PLACE
        vector = math.gcd(m // heads, 16 // packed.element_size())
        with torch.cuda.device_of(packed):
            traced(_into_heads)[(triton.cdiv(tokens, rows),)](
                packed,
                bias,
                tokens,
                M=m,
                c=m // heads,
                VECTOR=vector,
                TOKENS=rows,
                SIZE=triton.next_power_of_2(8 * m),
                num_warps=warps,
            )
    return packed.unflatten(1, (3, heads, 8 * m // heads)).transpose(0, 1)


def to_packed(
    features: list[torch.Tensor], packed: torch.Tensor, origin: int, *, pairs: bool = False
) -> None:
    """The inverse: features [B, N, H, D] of a batch written to packed[T, parts · C], from token `origin` on.

    With `pairs` they are what the kernels for Hopper have written.
    """
    x = features[0]
    tokens, heads, dim = x.shape[0] * x.shape[1], *x.shape[2:]
    if tokens:
        with torch.cuda.device_of(x):
            grid, meta = _grid("to packed", x, tokens, heads * dim // 8, dim // 8, pairs)
            traced(_to_packed)[grid](*_three(features), packed, origin, tokens, **meta, PAIRS=pairs)


def _three(features: list[torch.Tensor]) -> list[torch.Tensor | None]:
    return [*features, *[None] * (3 - len(features))]
