"""Attention over short sequences, a whole head at a time, for heads whose pieces are not aligned.

    o_i = Σ_j softmax_j(q_i · k_j / √D) v_j

The layout is that of `attention.py`, but c need not be 8 or 16. Pieces of ten entries are read four bytes at a
time, so what counts is to read them once: a program loads all keys and values of its head, keeps them in shared
memory and steps through the queries. They come in WHOLE segments of STEP rows and a masked TAIL. A head's vector is
a tile of DIM entries and one of REST (80 = 64 + 16).

There are gradients for up to SHORT tokens, of which a program holds all scores at once. It computes them anew, so
nothing but qkv is kept for them.
"""

import math

import torch
import triton
import triton.language as tl

from quickvit.ops.packing import Shapes, places
from quickvit.ops.tiles import tile
from quickvit.ops.triton.heads import head_bias, head_columns
from quickvit.ops.triton.launch import shared_memory, traced

# By head size: the two parts of a vector.
PARTS: dict[int, tuple[int, int]] = {80: (64, 16)}
# Queries per step, keys per segment, warps and stages.
TILE: tuple[int, int, int, int] = (64, 64, 4, 2)
# More keys and values than these do not fit into shared memory twice, for two programs at a time.
MAX_TOKENS = 272
# Tokens of sequences that have gradients; warps for those.
SHORT = 64
GRADIENT_TILE: tuple[int] = (4,)
# What a program needs where products cannot read their operands there, as Hopper's do; some GPUs have less.
SHARED_BYTES = 101_504

_LOG2E = tl.constexpr(1 / math.log(2))


@triton.jit
def _load(
    tokens,
    row,
    inside,
    head,
    PART: tl.constexpr,
    HEADS: tl.constexpr,
    c: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Rows of q, k or v (PART 0, 1, 2): their first DIM and last REST entries, zero where rows are not inside."""
    line = tokens + row[:, None] * (24 * c * HEADS)
    first = line + head_columns(head, PART, 3, HEADS, c, 0, DIM, VECTOR)
    last = line + head_columns(head, PART, 3, HEADS, c, DIM, REST, VECTOR)
    if inside is None:
        tiles = tl.load(first), tl.load(last)
    else:
        mask = inside[:, None]
        tiles = tl.load(first, mask=mask, other=0.0), tl.load(last, mask=mask, other=0.0)
    return tiles


@triton.jit
def _attend(q, keys, values, exists, SCALE: tl.constexpr):
    """Softmax in base 2 over the segments of keys: Σ weights and Σ weights · v, up to a common factor."""
    largest = None
    total = None
    sums = ()
    for segment in tl.static_range(len(keys)):
        score = tl.dot(q[0], tl.trans(keys[segment][0]))
        score = tl.dot(q[1], tl.trans(keys[segment][1]), score)
        if exists is not None and segment == len(keys) - 1:
            score = tl.where(exists[None, :], score, -float("inf"))
        v = values[segment]
        larger = tl.max(score, axis=1) * SCALE
        if segment > 0:
            larger = tl.maximum(largest, larger)
        weight = tl.math.exp2(tl.fma(score, SCALE, -larger[:, None]))
        share = weight.to(v[0].dtype)
        if segment == 0:
            total = tl.sum(weight, axis=1)
            sums = tl.dot(share, v[0]), tl.dot(share, v[1])
        else:
            shrink = tl.math.exp2(largest - larger)
            total = total * shrink + tl.sum(weight, axis=1)
            before = sums[0] * shrink[:, None], sums[1] * shrink[:, None]
            sums = tl.dot(share, v[0], before[0]), tl.dot(share, v[1], before[1])
        largest = larger
    return total, sums


@triton.jit(do_not_specialize=["origin", "N"])
def _attention_whole_head(
    qkv,
    bias,
    out,
    origin,
    N,
    HEADS: tl.constexpr,
    c: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    WHOLE: tl.constexpr,
    TAIL: tl.constexpr,
):
    """All queries of one head, BLOCK at a time, against all keys; the batch begins at token `origin`."""
    C: tl.constexpr = 8 * c * HEADS
    SCALE: tl.constexpr = _LOG2E / (8 * c) ** 0.5
    head = tl.program_id(0) % HEADS
    sequence = (tl.program_id(0) // HEADS).to(tl.int64) * N
    tokens = qkv + (origin + sequence) * (3 * C)

    keys = ()
    values = ()
    exists = None
    for segment in tl.static_range(WHOLE):
        these = segment * STEP + tl.arange(0, STEP)
        keys += (_load(tokens, these, None, head, 1, HEADS, c, DIM, REST, VECTOR),)
        values += (_load(tokens, these, None, head, 2, HEADS, c, DIM, REST, VECTOR),)
    if TAIL > 0:
        last = WHOLE * STEP + tl.arange(0, TAIL)
        exists = last < N
        keys += (_load(tokens, last, exists, head, 1, HEADS, c, DIM, REST, VECTOR),)
        values += (_load(tokens, last, exists, head, 2, HEADS, c, DIM, REST, VECTOR),)

    for start in range(0, N, BLOCK):
        row = start + tl.arange(0, BLOCK)
        inside = row < N
        q = _load(tokens, row, inside, head, 0, HEADS, c, DIM, REST, VECTOR)
        if bias is not None:
            biased = q[0].to(tl.float32) + head_bias(bias, head, 0, HEADS, c, DIM)
            q = biased.to(q[0].dtype), q[1]
        total, sums = _attend(q, keys, values, exists, SCALE)
        first = sums[0] / total[:, None]
        rest = sums[1] / total[:, None]
        if bias is not None:
            first += head_bias(bias, head, 2, HEADS, c, DIM)
        line = out + (origin + sequence) * C + row[:, None] * C
        dtype: tl.constexpr = out.dtype.element_ty
        tl.store(
            line + head_columns(head, 0, 1, HEADS, c, 0, DIM, VECTOR), first.to(dtype), mask=inside[:, None]
        )
        tl.store(
            line + head_columns(head, 0, 1, HEADS, c, DIM, REST, VECTOR), rest.to(dtype), mask=inside[:, None]
        )


@triton.jit
def _store(
    line,
    values,
    inside,
    head,
    PART: tl.constexpr,
    HEADS: tl.constexpr,
    c: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VECTOR: tl.constexpr,
):
    """Rows of the gradient of q, k or v, in two parts as `_load` gives them."""
    dtype: tl.constexpr = line.dtype.element_ty
    first = line + head_columns(head, PART, 3, HEADS, c, 0, DIM, VECTOR)
    last = line + head_columns(head, PART, 3, HEADS, c, DIM, REST, VECTOR)
    tl.store(first, values[0].to(dtype), mask=inside[:, None])
    tl.store(last, values[1].to(dtype), mask=inside[:, None])


@triton.jit(do_not_specialize=["origin", "N"])
def _gradient_whole_head(
    dout,
    qkv,
    bias,
    dqkv,
    origin,
    N,
    HEADS: tl.constexpr,
    c: tl.constexpr,
    DIM: tl.constexpr,
    REST: tl.constexpr,
    VECTOR: tl.constexpr,
    ROWS: tl.constexpr,
):
    """The gradient of all q, k and v of one head, from that of the result, dout.

    With weights P = softmax(S), S = q kᵀ / √D:    dP = do vᵀ,    dS = P (dP - Σ_j P dP),    dv = Pᵀ do,
    dq = dS k / √D,    dk = dSᵀ q / √D.
    """
    C: tl.constexpr = 8 * c * HEADS
    SCALE: tl.constexpr = 1 / (8 * c) ** 0.5
    head = tl.program_id(0) % HEADS
    sequence = (tl.program_id(0) // HEADS).to(tl.int64) * N
    tokens = qkv + (origin + sequence) * (3 * C)
    row = tl.arange(0, ROWS)
    inside = row < N

    q = _load(tokens, row, inside, head, 0, HEADS, c, DIM, REST, VECTOR)
    k = _load(tokens, row, inside, head, 1, HEADS, c, DIM, REST, VECTOR)
    v = _load(tokens, row, inside, head, 2, HEADS, c, DIM, REST, VECTOR)
    line = dout + (origin + sequence) * C + row[:, None] * C
    do = (
        tl.load(line + head_columns(head, 0, 1, HEADS, c, 0, DIM, VECTOR), mask=inside[:, None], other=0.0),
        tl.load(
            line + head_columns(head, 0, 1, HEADS, c, DIM, REST, VECTOR), mask=inside[:, None], other=0.0
        ),
    )
    if bias is not None:
        biased = q[0].to(tl.float32) + head_bias(bias, head, 0, HEADS, c, DIM)
        q = biased.to(q[0].dtype), q[1]

    score = tl.dot(q[0], tl.trans(k[0]))
    score = tl.dot(q[1], tl.trans(k[1]), score)
    score = tl.where(inside[None, :], score, -float("inf"))
    score -= tl.max(score, axis=1)[:, None]
    weight = tl.math.exp2(score * (SCALE * _LOG2E))
    weight /= tl.sum(weight, axis=1)[:, None]
    slope = tl.dot(do[0], tl.trans(v[0]))
    slope = tl.dot(do[1], tl.trans(v[1]), slope)
    slope = weight * (slope - tl.sum(weight * slope, axis=1)[:, None]) * SCALE

    share, slope = weight.to(v[0].dtype), slope.to(v[0].dtype)
    line = dqkv + (origin + sequence) * (3 * C) + row[:, None] * (3 * C)
    dq = tl.dot(slope, k[0]), tl.dot(slope, k[1])
    _store(line, dq, inside, head, 0, HEADS, c, DIM, REST, VECTOR)
    turned = tl.trans(slope)
    dk = tl.dot(turned, q[0]), tl.dot(turned, q[1])
    _store(line, dk, inside, head, 1, HEADS, c, DIM, REST, VECTOR)
    turned = tl.trans(share)
    dv = tl.dot(turned, do[0]), tl.dot(turned, do[1])
    _store(line, dv, inside, head, 2, HEADS, c, DIM, REST, VECTOR)


def takes(tokens: int, dim: int, device: torch.device) -> bool:
    """Whether heads of this size are known, and there is room for so many keys."""
    return dim in PARTS and tokens <= MAX_TOKENS and shared_memory(device) >= SHARED_BYTES


def attention_whole_head(
    qkv: torch.Tensor, bias: torch.Tensor | None, heads: int, shapes: Shapes
) -> torch.Tensor:
    """Attention over packed qkv[T, 3C] with the A1 bias[3C/8] of q, k, v, in sequences of these shapes: o[T, C]."""
    out = torch.empty((qkv.shape[0], qkv.shape[1] // 3), dtype=qkv.dtype, device=qkv.device)
    for origin, number, length in places(shapes):
        attention_of_batch(qkv, bias, out, heads, (number, length), origin)
    return out


def attention_of_batch(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    heads: int,
    shape: tuple[int, int],
    origin: int,
) -> None:
    """The same for one batch, which begins at token `origin`, written to the same tokens of out[T, C]."""
    number, length = shape
    if not number * length:
        return
    meta = _vectors(qkv, heads)
    block, step, warps, stages = tile("whole heads", (8 * meta["c"], length), qkv.device, TILE)
    left = length % step
    with torch.cuda.device_of(qkv):
        traced(_attention_whole_head)[(number * heads,)](
            qkv,
            bias,
            out,
            origin,
            length,
            **meta,
            BLOCK=block,
            STEP=step,
            WHOLE=length // step,
            TAIL=max(16, triton.next_power_of_2(left)) if left else 0,
            num_warps=warps,
            num_stages=stages,
        )


def gradient_of_batch(
    dout: torch.Tensor,
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    dqkv: torch.Tensor,
    heads: int,
    shape: tuple[int, int],
    origin: int,
) -> None:
    """The gradient of `attention_of_batch` from dout[T, C], written to the same tokens of dqkv[T, 3C]."""
    number, length = shape
    if not number * length:
        return
    meta = _vectors(qkv, heads)
    (warps,) = tile("whole heads gradient", (8 * meta["c"], length), qkv.device, GRADIENT_TILE)
    with torch.cuda.device_of(qkv):
        traced(_gradient_whole_head)[(number * heads,)](
            dout,
            qkv,
            bias,
            dqkv,
            origin,
            length,
            **meta,
            ROWS=max(16, triton.next_power_of_2(length)),
            num_warps=warps,
        )


def _vectors(qkv: torch.Tensor, heads: int) -> dict[str, int]:
    """How vectors of heads lie in packed channels."""
    size = qkv.shape[1] // (3 * heads)
    dim, rest = PARTS[size]
    vector = math.gcd(size // 8, 16 // qkv.element_size())
    return {"HEADS": heads, "c": size // 8, "DIM": dim, "REST": rest, "VECTOR": vector}
