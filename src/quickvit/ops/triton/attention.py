"""Flash attention that reads and writes packed channels.

    o_i = Σ_j softmax_j(q_i · k_j / √D) v_j

qkv[T, 3C] is the packed output of an octic linear map C → 3C, with c = C/8/H for H heads: the blocks A1,
A2, B1, B2 run over (q k v, head, c), the two components of E over (q k v, head, 2c). The vector of a head, of
size D = 8c, is the concatenation of its six pieces, which are gathered here: no tensor is permuted on the way
in or out. c is 8 or 16, so that pieces are whole groups of eight entries, 16 bytes of a 16-bit type.

The tokens are those of batches of B sequences of N tokens, one after the other. Each batch has a launch of its
own, which begins at token `origin` of the tensors that all share; what is one number per query and head, [B, H, N]
for a batch, begins at `origin · H` there.

qkv may also be RUNS, [T, 2, 3, H, 4c]: of each head the pieces of A1 A2 B1 B2 side by side, then of each those of E,
which are read faster. Gradients are packed all the same.

The A1 bias of the linear map is added here. That of q is added to q; that of k shifts the scores of a query
all alike, so softmax does not see it; that of v is added to the output, since the weights sum to one.

A program keeps rows of its own and steps through the others, the first STEP ⌊N / STEP⌋ of them unmasked. The
rest is one smaller, masked step, TAIL: N is often a few more than a multiple of 64, for the class token.
"""

import math

import torch
import triton
import triton.language as tl

from quickvit.ops.packing import Shapes, places
from quickvit.ops.tiles import tile
from quickvit.ops.triton.heads import head_bias, head_columns
from quickvit.ops.triton.launch import traced

# By head size: the tiles to choose from, as (own rows, rows per step, warps, stages). Own rows are queries, but
# for the gradients of k and v they are keys; the tile that pads them least is taken, the first of equals.
Tiles = dict[int, tuple[tuple[int, int, int, int], ...]]
FORWARD_TILES: Tiles = {64: ((128, 16, 4, 3), (64, 16, 4, 3)), 128: ((64, 16, 4, 3),)}
FORWARD_TILES_OF_RUNS: Tiles = FORWARD_TILES | {64: ((128, 32, 4, 3), (64, 32, 4, 3))}
QUERY_TILES: Tiles = {64: ((128, 64, 8, 1), (64, 32, 4, 2)), 128: ((128, 64, 8, 2), (64, 64, 8, 2))}
KEY_TILES: Tiles = {64: ((64, 16, 4, 3),), 128: ((128, 32, 8, 2), (64, 64, 8, 2))}

_LOG2E = tl.constexpr(1 / math.log(2))
_LN2 = tl.constexpr(math.log(2))


@triton.jit
def _own_rows(origin, N, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """The first token of this program's sequence, its head, where numbers of its queries begin, and its first row."""
    blocks = tl.cdiv(N, BLOCK)
    pair = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK
    token = origin + (pair // HEADS).to(tl.int64) * N
    return token, pair % HEADS, tl.cast(origin, tl.int64) * HEADS + pair.to(tl.int64) * N, first


@triton.jit
def _columns(head, PART: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, c: tl.constexpr):
    """Columns [1, D] of a head in one of the PARTS features that a token holds."""
    return head_columns(head, PART, PARTS, HEADS, c, 0, 8 * c, 8)


@triton.jit
def _source(head, PART: tl.constexpr, HEADS: tl.constexpr, c: tl.constexpr, RUNS: tl.constexpr):
    """Columns [1, D] of a head in q, k or v: of packed channels, or of RUNS."""
    if RUNS:
        d = tl.arange(0, 8 * c)
        column = d // (4 * c) * (12 * HEADS * c) + (PART * HEADS + head) * 4 * c + d % (4 * c)
        column = tl.max_contiguous(tl.multiple_of(column, 4 * c), 4 * c)[None, :]
    else:
        column = _columns(head, PART, 3, HEADS, c)
    return column


@triton.jit
def _load(pointer, row, inside, column, STRIDE: tl.constexpr):
    """Rows from the given pointer on, all of them or those inside, the others zero."""
    if inside is None:
        tile = tl.load(pointer + (row[:, None] * STRIDE + column))
    else:
        tile = tl.load(pointer + (row[:, None] * STRIDE + column), mask=inside[:, None], other=0.0)
    return tile


@triton.jit
def _store(pointer, value, row, inside, column, STRIDE: tl.constexpr):
    value = value.to(pointer.dtype.element_ty)
    tl.store(pointer + (row[:, None] * STRIDE + column), value, mask=inside[:, None])


@triton.jit
def _forward_step(
    q,
    tokens,
    row,
    inside,
    k_column,
    v_column,
    largest,
    total,
    acc,
    STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
):
    """One step of softmax in base 2: the largest score, the sum of weights and of weighted values so far."""
    k = _load(tokens, row, inside, k_column, STRIDE)
    v = _load(tokens, row, inside, v_column, STRIDE)
    score = tl.dot(q, tl.trans(k))
    if inside is not None:
        score = tl.where(inside[None, :], score, -float("inf"))
    larger = tl.maximum(largest, tl.max(score, axis=1) * SCALE)
    weight = tl.math.exp2(tl.fma(score, SCALE, -larger[:, None]))
    shrink = tl.math.exp2(largest - larger)
    total = total * shrink + tl.sum(weight, axis=1)
    return larger, total, tl.dot(weight.to(v.dtype), v, acc * shrink[:, None])


@triton.jit(do_not_specialize=["origin", "N"])
def _attention_forward(
    qkv,
    bias,
    out,
    lse,
    origin,
    N,
    HEADS: tl.constexpr,
    c: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TAIL: tl.constexpr,
    RUNS: tl.constexpr,
):
    """BLOCK queries of one head against all keys."""
    C: tl.constexpr = 8 * c * HEADS
    SCALE: tl.constexpr = _LOG2E / (8 * c) ** 0.5
    sequence, head, line, first = _own_rows(origin, N, HEADS, BLOCK)
    row, step = tl.arange(0, BLOCK), tl.arange(0, STEP)
    inside = first + row < N
    tokens = qkv + sequence * (3 * C)
    k_column, v_column = _source(head, 1, HEADS, c, RUNS), _source(head, 2, HEADS, c, RUNS)
    q_column = _source(head, 0, HEADS, c, RUNS)
    q = _load(tokens + first.to(tl.int64) * (3 * C), row, inside, q_column, 3 * C)
    if bias is not None:
        q = (q.to(tl.float32) + head_bias(bias, head, 0, HEADS, c, 8 * c)).to(q.dtype)

    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, 8 * c], tl.float32)
    whole = N // STEP * STEP
    # The tail goes first: behind the loop, whose last product is still under way, it would make the assembler
    # serialise all products.
    if TAIL > 0:
        tail = tl.arange(0, TAIL)
        others = tokens + whole.to(tl.int64) * (3 * C)
        largest, total, acc = _forward_step(
            q, others, tail, whole + tail < N, k_column, v_column, largest, total, acc, 3 * C, SCALE
        )
    for start in range(0, whole, STEP):
        others = tokens + tl.cast(start, tl.int64) * (3 * C)
        largest, total, acc = _forward_step(
            q, others, step, None, k_column, v_column, largest, total, acc, 3 * C, SCALE
        )

    tl.store(lse + line + first + row, (largest + tl.math.log2(total)) * _LN2, mask=inside)
    acc = acc / total[:, None]
    if bias is not None:
        acc += head_bias(bias, head, 2, HEADS, c, 8 * c)
    _store(out + (sequence + first) * C, acc, row, inside, _columns(head, 0, 1, HEADS, c), C)


@triton.jit
def _query_step(
    q,
    do,
    log_total,
    delta,
    tokens,
    row,
    inside,
    k_column,
    v_column,
    dq,
    STRIDE: tl.constexpr,
    SCALE: tl.constexpr,
):
    """dq + Σ_j dS_j k_j over the keys of a step, with dS = P (do · v - δ)."""
    k = _load(tokens, row, inside, k_column, STRIDE)
    v = _load(tokens, row, inside, v_column, STRIDE)
    score = tl.dot(q, tl.trans(k))
    slope = tl.dot(do, tl.trans(v))
    if inside is not None:
        score = tl.where(inside[None, :], score, -float("inf"))
    weight = tl.math.exp2(tl.fma(score, SCALE, -log_total[:, None]))
    dscore = weight * (slope - delta[:, None])
    return tl.dot(dscore.to(k.dtype), k, dq)


@triton.jit(do_not_specialize=["origin", "N"])
def _attention_backward_query(
    dout,
    qkv,
    bias,
    out,
    lse,
    deltas,
    dqkv,
    origin,
    N,
    HEADS: tl.constexpr,
    c: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TAIL: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Gradient of BLOCK queries of one head, dq = Σ_j dS_j k_j / √D.

    δ = do · (o - b_v) is stored for the gradients of keys and values.
    """
    C: tl.constexpr = 8 * c * HEADS
    SCALE: tl.constexpr = _LOG2E / (8 * c) ** 0.5
    sequence, head, line, first = _own_rows(origin, N, HEADS, BLOCK)
    row, step = tl.arange(0, BLOCK), tl.arange(0, STEP)
    inside = first + row < N
    tokens = qkv + sequence * (3 * C)
    own = sequence + first
    q_column, o_column = _source(head, 0, HEADS, c, RUNS), _columns(head, 0, 1, HEADS, c)
    k_column, v_column = _source(head, 1, HEADS, c, RUNS), _source(head, 2, HEADS, c, RUNS)
    q = _load(qkv + own * (3 * C), row, inside, q_column, 3 * C)
    do = _load(dout + own * C, row, inside, o_column, C)
    o = _load(out + own * C, row, inside, o_column, C).to(tl.float32)
    if bias is not None:
        # A choice after the sum: with the sum alone the compiler keeps q in registers throughout, at half the
        # occupancy.
        biased = (q.to(tl.float32) + head_bias(bias, head, 0, HEADS, c, 8 * c)).to(q.dtype)
        q = tl.where(tl.arange(0, 8 * c)[None, :] < c, biased, q)
        o -= head_bias(bias, head, 2, HEADS, c, 8 * c)
    delta = tl.sum(do.to(tl.float32) * o, axis=1)
    tl.store(deltas + line + first + row, delta, mask=inside)
    log_total = tl.load(lse + line + first + row, mask=inside, other=float("inf")) * _LOG2E

    dq = tl.zeros([BLOCK, 8 * c], tl.float32)
    whole = N // STEP * STEP
    if TAIL > 0:
        tail = tl.arange(0, TAIL)
        others = tokens + whole.to(tl.int64) * (3 * C)
        dq = _query_step(
            q, do, log_total, delta, others, tail, whole + tail < N, k_column, v_column, dq, 3 * C, SCALE
        )
    for start in range(0, whole, STEP):
        others = tokens + tl.cast(start, tl.int64) * (3 * C)
        dq = _query_step(q, do, log_total, delta, others, step, None, k_column, v_column, dq, 3 * C, SCALE)

    dq_column = _columns(head, 0, 3, HEADS, c)
    _store(dqkv + own * (3 * C), dq * (SCALE * _LN2), row, inside, dq_column, 3 * C)


@triton.jit
def _key_step(
    k,
    v,
    lift,
    tokens,
    douts,
    lse,
    deltas,
    row,
    inside,
    q_column,
    o_column,
    dk,
    dv,
    dlift,
    C: tl.constexpr,
    SCALE: tl.constexpr,
):
    """dk + Σ_i dS_i q_i, dv + Σ_i P_i do_i and dlift + Σ_i dS_i over the queries of a step.

    Tiles are [keys, queries]; `lift` is what the bias of the queries adds to the scores of each key.
    """
    q = _load(tokens, row, inside, q_column, 3 * C)
    do = _load(douts, row, inside, o_column, C)
    if inside is None:
        log_total, delta = tl.load(lse + row) * _LOG2E, tl.load(deltas + row)
    else:
        # Queries past the end weigh nothing: exp2(-inf).
        log_total = tl.load(lse + row, mask=inside, other=float("inf")) * _LOG2E
        delta = tl.load(deltas + row, mask=inside, other=0.0)
    score = tl.dot(k, tl.trans(q))
    slope = tl.dot(v, tl.trans(do))
    if lift is None:
        weight = tl.math.exp2(tl.fma(score, SCALE, -log_total[None, :]))
    else:
        weight = tl.math.exp2(tl.fma(score, SCALE, lift[:, None] - log_total[None, :]))
    dscore = weight * (slope - delta[None, :])
    if lift is not None:
        dlift += tl.sum(dscore, axis=1)
    dv = tl.dot(weight.to(do.dtype), do, dv)
    return tl.dot(dscore.to(q.dtype), q, dk), dv, dlift


@triton.jit(do_not_specialize=["origin", "N"])
def _attention_backward_key(
    dout,
    qkv,
    bias,
    lse,
    deltas,
    dqkv,
    origin,
    N,
    HEADS: tl.constexpr,
    c: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TAIL: tl.constexpr,
    RUNS: tl.constexpr,
):
    """Gradients of BLOCK keys and values of one head: dv = Σ_i P_i do_i, dk = Σ_i dS_i (q_i + b_q) / √D.

    The queries stay as they are stored, so that they go straight from memory to the products: their bias
    enters as b_q · k in the scores and as b_q Σ_i dS_i in dk.
    """
    C: tl.constexpr = 8 * c * HEADS
    SCALE: tl.constexpr = _LOG2E / (8 * c) ** 0.5
    sequence, head, line, first = _own_rows(origin, N, HEADS, BLOCK)
    row, step = tl.arange(0, BLOCK), tl.arange(0, STEP)
    inside = first + row < N
    own = (sequence + first) * (3 * C)
    q_column, o_column = _source(head, 0, HEADS, c, RUNS), _columns(head, 0, 1, HEADS, c)
    k_column, v_column = _source(head, 1, HEADS, c, RUNS), _source(head, 2, HEADS, c, RUNS)
    k = _load(qkv + own, row, inside, k_column, 3 * C)
    v = _load(qkv + own, row, inside, v_column, 3 * C)
    lift = None
    if bias is not None:
        lift = tl.sum(k.to(tl.float32) * head_bias(bias, head, 0, HEADS, c, 8 * c), axis=1) * SCALE

    dk = tl.zeros([BLOCK, 8 * c], tl.float32)
    dv = tl.zeros([BLOCK, 8 * c], tl.float32)
    dlift = tl.zeros([BLOCK], tl.float32)
    whole = N // STEP * STEP
    if TAIL > 0:
        tail = tl.arange(0, TAIL)
        dk, dv, dlift = _key_step(
            k,
            v,
            lift,
            qkv + (sequence + whole) * (3 * C),
            dout + (sequence + whole) * C,
            lse + line + whole,
            deltas + line + whole,
            tail,
            whole + tail < N,
            q_column,
            o_column,
            dk,
            dv,
            dlift,
            C,
            SCALE,
        )
    for start in range(0, whole, STEP):
        dk, dv, dlift = _key_step(
            k,
            v,
            lift,
            qkv + (sequence + start) * (3 * C),
            dout + (sequence + start) * C,
            lse + line + start,
            deltas + line + start,
            step,
            None,
            q_column,
            o_column,
            dk,
            dv,
            dlift,
            C,
            SCALE,
        )

    if bias is not None:
        dk += dlift[:, None] * head_bias(bias, head, 0, HEADS, c, 8 * c)
    _store(dqkv + own, dk * (SCALE * _LN2), row, inside, _columns(head, 1, 3, HEADS, c), 3 * C)
    _store(dqkv + own, dv, row, inside, _columns(head, 2, 3, HEADS, c), 3 * C)


def _tile(kernel: str, tiles: Tiles, dim: int, rows: int, device: torch.device) -> tuple[int, dict[str, int]]:
    """Programs per head, and the tile as the kernels take it."""
    if dim not in tiles:
        raise ValueError(f"heads have size {dim}, expected one of {', '.join(map(str, tiles))}")
    default = min(tiles[dim], key=lambda choice: triton.cdiv(rows, choice[0]) * choice[0])
    block, step, warps, stages = tile(kernel, (dim, rows), device, default)
    rest = rows % step
    tail = max(16, triton.next_power_of_2(rest)) if rest else 0
    meta = {"BLOCK": block, "STEP": step, "TAIL": tail, "num_warps": warps, "num_stages": stages}
    return triton.cdiv(rows, block), meta


def attention_forward(
    qkv: torch.Tensor, bias: torch.Tensor | None, heads: int, shapes: Shapes, runs: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over qkv[T, 3C], packed or `runs`, with the A1 bias[3C/8] of q, k, v, in sequences of these shapes.

    Returns o[T, C], packed, and the log-sum-exp of the scaled scores in float32, lse[T H], of each batch [B, H, N],
    without the constant that k's bias adds to it.
    """
    tokens, width = qkv.shape
    dim = width // (3 * heads)
    out = torch.empty((tokens, width // 3), dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty(tokens * heads, dtype=torch.float32, device=qkv.device)
    kernel = "attention forward of runs" if runs else "attention forward"
    tiles = FORWARD_TILES_OF_RUNS if runs else FORWARD_TILES
    with torch.cuda.device_of(qkv):
        for origin, number, length in places(shapes):
            programs, meta = _tile(kernel, tiles, dim, length, qkv.device)
            traced(_attention_forward)[(number * heads * programs,)](
                qkv, bias, out, lse, origin, length, HEADS=heads, c=dim // 8, RUNS=runs, **meta
            )
    return out, lse


def attention_backward(
    dout: torch.Tensor,
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    heads: int,
    shapes: Shapes,
    runs: bool = False,
) -> torch.Tensor:
    """Gradient dqkv[T, 3C] of `attention_forward`, packed; the bias's is the sum of its A1 columns."""
    dim = qkv.shape[1] // (3 * heads)
    dqkv = torch.empty_like(qkv)
    deltas = torch.empty_like(lse)
    with torch.cuda.device_of(qkv):
        for origin, number, length in places(shapes):
            programs, meta = _tile("attention query gradient", QUERY_TILES, dim, length, qkv.device)
            traced(_attention_backward_query)[(number * heads * programs,)](
                dout,
                qkv,
                bias,
                out,
                lse,
                deltas,
                dqkv,
                origin,
                length,
                HEADS=heads,
                c=dim // 8,
                RUNS=runs,
                **meta,
            )
            programs, meta = _tile("attention key gradient", KEY_TILES, dim, length, qkv.device)
            traced(_attention_backward_key)[(number * heads * programs,)](
                dout, qkv, bias, lse, deltas, dqkv, origin, length, HEADS=heads, c=dim // 8, RUNS=runs, **meta
            )
    return dqkv
