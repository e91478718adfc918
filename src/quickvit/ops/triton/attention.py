"""Flash attention that reads and writes packed channels.

    o_i = Σ_j softmax_j(q_i · k_j / √D) v_j

qkv[B, N, 3C] is the packed output of an octic linear map C → 3C, with m = C/8 and c = m/H for H heads: the
blocks A1, A2, B1, B2 have 3m columns each, running over (q k v, head, c), the two components of E 6m each,
over (q k v, head, 2c). The vector of a head, of size D = 8c, is the concatenation of its six pieces. Its
columns are computed here, once per program: no tensor is permuted on the way in or out.

The A1 bias of the linear map is added here. That of q is added to q; that of k shifts the scores of a query
all alike, so softmax does not see it; that of v is added to the output, since the weights sum to one.

A piece of a head need not start where a wide load may: with c = 13 it starts at any even byte. So pieces
are read in whole aligned groups of entries, neighbours included. A product q · k with zeros for the
neighbours' entries on one side does not notice them on the other: tiles that a program owns are masked,
tiles that stream past are not, and only own entries are stored. The padded vector is held as two powers of
two where that is shorter, as 64 + 32 for D = 80.
"""

import math

import torch
import triton
import triton.language as tl

# By bytes per element, then by padded head size: the tiles to choose from, as (own rows, rows per step,
# warps, stages). Own rows are queries, but for the gradients of k and v they are keys; the tile that pads
# them least is taken, the first of equals.
Tiles = dict[int, dict[int, tuple[tuple[int, int, int, int], ...]]]
FORWARD_TILES: Tiles = {
    2: {
        64: ((128, 32, 4, 3),),
        96: ((128, 64, 8, 3), (64, 64, 4, 3)),
        128: ((128, 64, 8, 3), (64, 64, 4, 3)),
        256: ((64, 64, 8, 2),),
    },
    4: {64: ((64, 32, 8, 2),), 128: ((32, 32, 8, 2),), 256: ((16, 16, 8, 1),)},
}
QUERY_TILES: Tiles = {
    2: {
        64: ((128, 64, 8, 1),),
        128: ((128, 64, 8, 2), (64, 64, 8, 2)),
        256: ((64, 32, 8, 1),),
    },
    4: {64: ((32, 32, 8, 1),), 128: ((32, 16, 8, 1),), 256: ((16, 16, 8, 1),)},
}
KEY_TILES: Tiles = {
    2: {
        64: ((64, 32, 4, 2),),
        128: ((128, 32, 8, 2), (64, 64, 8, 2)),
        256: ((64, 32, 8, 1),),
    },
    4: {64: ((32, 32, 8, 1),), 128: ((16, 32, 8, 1),), 256: ((16, 16, 8, 1),)},
}

_LOG2E = tl.constexpr(1 / math.log(2))
_LN2 = tl.constexpr(math.log(2))


@triton.jit
def _places(
    j,
    head,
    M: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    PLANE: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Where entries j of a head's padded vector lie: four pieces of LINE groups, then two of PLANE groups.

    Returns which of the eight blocks of m columns the piece's block begins with, the place in that block,
    which entries lie in it at all, and which of them are the head's own.
    """
    group = j // GROUP
    on_line = group < 4 * LINE
    e = group - 4 * LINE
    block = tl.where(on_line, group // LINE, 4 + 2 * (e // PLANE))
    length = tl.where(on_line, CHANNELS, 2 * CHANNELS)
    begin = head * length
    place = begin // GROUP * GROUP + tl.where(on_line, group % LINE, e % PLANE) * GROUP + j % GROUP
    place = tl.max_contiguous(tl.multiple_of(place, GROUP), GROUP)
    present = (place < tl.where(on_line, M, 2 * M)) & (block < 8)
    own = present & (place >= begin) & (place < begin + length)
    # The compiler cannot prove what wide accesses need: groups lie in their block whole, own entries come
    # in runs.
    return block, place, tl.max_constancy(present, GROUP), tl.max_constancy(own, UNIT)


@triton.jit
def _columns(block, place, PART: tl.constexpr, PARTS: tl.constexpr, M: tl.constexpr, GROUP: tl.constexpr):
    """Columns in one of the PARTS features that a token holds."""
    column = block * (PARTS * M) + PART * tl.where(block < 4, M, 2 * M) + place
    return tl.max_contiguous(tl.multiple_of(column, GROUP), GROUP)


@triton.jit
def _load(pointer, row, row_in, column, column_in, STRIDE: tl.constexpr):
    mask = row_in[:, None] & column_in[None, :]
    return tl.load(pointer + (row[:, None] * STRIDE + column[None, :]), mask=mask, other=0.0)


@triton.jit
def _load_own(pointer, row, row_in, column, column_in, own, STRIDE: tl.constexpr, EXACT: tl.constexpr):
    """As _load, with zeros for the neighbours' entries."""
    tile = _load(pointer, row, row_in, column, column_in, STRIDE)
    if not EXACT:
        tile = tl.where(own[None, :], tile, 0.0).to(tile.dtype)
    return tile


@triton.jit
def _store(pointer, value, row, row_in, column, own, STRIDE: tl.constexpr):
    mask = row_in[:, None] & own[None, :]
    offset = row[:, None] * STRIDE + column[None, :]
    tl.store(pointer + offset, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _load_bias(bias, block, place, own):
    """The A1 bias of one of q, k, v as a row over a head's padded vector."""
    return tl.load(bias + place, mask=own & (block == 0), other=0.0).to(tl.float32)[None, :]


@triton.jit
def _own_block(N, HEADS: tl.constexpr, BLOCK: tl.constexpr):
    """This program's (batch, head) pair as one number, its batch, its head and its first row."""
    blocks = tl.cdiv(N, BLOCK)
    pair = tl.program_id(0) // blocks
    first = (tl.program_id(0) % blocks) * BLOCK
    return pair.to(tl.int64), (pair // HEADS).to(tl.int64), pair % HEADS, first


@triton.jit(do_not_specialize=["N"])
def _attention_forward(
    qkv,
    bias,
    out,
    lse,
    N,
    SCALE: tl.constexpr,
    M: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    PLANE: tl.constexpr,
    UNIT: tl.constexpr,
    DIM1: tl.constexpr,
    DIM2: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """BLOCK queries of one head against all keys, softmax kept up to date in base 2."""
    pair, batch, head, first = _own_block(N, M // CHANNELS, BLOCK)
    EXACT: tl.constexpr = UNIT == GROUP
    dtype: tl.constexpr = qkv.dtype.element_ty
    tokens = qkv + batch * N * (24 * M)
    row, step = tl.arange(0, BLOCK), tl.arange(0, STEP)
    row_in = first + row < N
    own = tokens + first.to(tl.int64) * (24 * M)

    j1 = tl.arange(0, DIM1)
    block1, place1, in1, own1 = _places(j1, head, M, CHANNELS, GROUP, LINE, PLANE, UNIT)
    q_column1 = _columns(block1, place1, 0, 3, M, GROUP)
    k_column1 = _columns(block1, place1, 1, 3, M, GROUP)
    v_column1 = _columns(block1, place1, 2, 3, M, GROUP)
    o_column1 = _columns(block1, place1, 0, 1, M, GROUP)
    q1 = _load_own(own, row, row_in, q_column1, in1, own1, 24 * M, EXACT)
    if bias is not None:
        q1 = (q1.to(tl.float32) + _load_bias(bias, block1, place1, own1)).to(dtype)
    acc1 = tl.zeros([BLOCK, DIM1], tl.float32)
    if DIM2 > 0:
        j2 = DIM1 + tl.arange(0, DIM2)
        block2, place2, in2, own2 = _places(j2, head, M, CHANNELS, GROUP, LINE, PLANE, UNIT)
        q_column2 = _columns(block2, place2, 0, 3, M, GROUP)
        k_column2 = _columns(block2, place2, 1, 3, M, GROUP)
        v_column2 = _columns(block2, place2, 2, 3, M, GROUP)
        o_column2 = _columns(block2, place2, 0, 1, M, GROUP)
        q2 = _load_own(own, row, row_in, q_column2, in2, own2, 24 * M, EXACT)
        acc2 = tl.zeros([BLOCK, DIM2], tl.float32)

    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, N, STEP):
        others = tokens + tl.cast(start, tl.int64) * (24 * M)
        step_in = start + step < N
        k1 = _load(others, step, step_in, k_column1, in1, 24 * M)
        score = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        if DIM2 > 0:
            k2 = _load(others, step, step_in, k_column2, in2, 24 * M)
            score = tl.dot(q2, tl.trans(k2), score, input_precision=PRECISION)
        score = tl.where(step_in[None, :], score, -float("inf"))
        larger = tl.maximum(largest, tl.max(score, axis=1) * (SCALE * _LOG2E))
        weight = tl.math.exp2(score * (SCALE * _LOG2E) - larger[:, None])
        shrink = tl.math.exp2(largest - larger)
        total = total * shrink + tl.sum(weight, axis=1)
        largest = larger
        weight = weight.to(dtype)
        v1 = _load(others, step, step_in, v_column1, in1, 24 * M)
        acc1 = tl.dot(weight, v1, acc1 * shrink[:, None], input_precision=PRECISION)
        if DIM2 > 0:
            v2 = _load(others, step, step_in, v_column2, in2, 24 * M)
            acc2 = tl.dot(weight, v2, acc2 * shrink[:, None], input_precision=PRECISION)

    tl.store(lse + pair * N + first + row, (largest + tl.math.log2(total)) * _LN2, mask=row_in)
    own = out + (batch * N + first) * (8 * M)
    acc1 = acc1 / total[:, None]
    if bias is not None:
        acc1 += _load_bias(bias + 2 * M, block1, place1, own1)
    _store(own, acc1, row, row_in, o_column1, own1, 8 * M)
    if DIM2 > 0:
        _store(own, acc2 / total[:, None], row, row_in, o_column2, own2, 8 * M)


@triton.jit(do_not_specialize=["N"])
def _attention_backward_query(
    dout,
    qkv,
    bias,
    out,
    lse,
    delta,
    dqkv,
    N,
    SCALE: tl.constexpr,
    M: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    PLANE: tl.constexpr,
    UNIT: tl.constexpr,
    DIM1: tl.constexpr,
    DIM2: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gradient of BLOCK queries of one head, dq = Σ_j dS_j k_j / √D with dS = P (do · v - δ).

    δ = do · (o - b_v) is stored for the gradients of keys and values.
    """
    pair, batch, head, first = _own_block(N, M // CHANNELS, BLOCK)
    EXACT: tl.constexpr = UNIT == GROUP
    dtype: tl.constexpr = qkv.dtype.element_ty
    tokens = qkv + batch * N * (24 * M)
    row, step = tl.arange(0, BLOCK), tl.arange(0, STEP)
    row_in = first + row < N
    own = batch * N + first

    j1 = tl.arange(0, DIM1)
    block1, place1, in1, own1 = _places(j1, head, M, CHANNELS, GROUP, LINE, PLANE, UNIT)
    q_column1 = _columns(block1, place1, 0, 3, M, GROUP)
    k_column1 = _columns(block1, place1, 1, 3, M, GROUP)
    v_column1 = _columns(block1, place1, 2, 3, M, GROUP)
    o_column1 = _columns(block1, place1, 0, 1, M, GROUP)
    do1 = _load_own(dout + own * (8 * M), row, row_in, o_column1, in1, own1, 8 * M, EXACT)
    o1 = _load(out + own * (8 * M), row, row_in, o_column1, in1, 8 * M).to(tl.float32)
    if bias is not None:
        o1 -= _load_bias(bias + 2 * M, block1, place1, own1)
    mean = tl.sum(do1.to(tl.float32) * o1, axis=1)
    q1 = _load_own(qkv + own * (24 * M), row, row_in, q_column1, in1, own1, 24 * M, EXACT)
    if bias is not None:
        q1 = (q1.to(tl.float32) + _load_bias(bias, block1, place1, own1)).to(dtype)
    dq1 = tl.zeros([BLOCK, DIM1], tl.float32)
    if DIM2 > 0:
        j2 = DIM1 + tl.arange(0, DIM2)
        block2, place2, in2, own2 = _places(j2, head, M, CHANNELS, GROUP, LINE, PLANE, UNIT)
        q_column2 = _columns(block2, place2, 0, 3, M, GROUP)
        k_column2 = _columns(block2, place2, 1, 3, M, GROUP)
        v_column2 = _columns(block2, place2, 2, 3, M, GROUP)
        o_column2 = _columns(block2, place2, 0, 1, M, GROUP)
        do2 = _load_own(dout + own * (8 * M), row, row_in, o_column2, in2, own2, 8 * M, EXACT)
        o2 = _load(out + own * (8 * M), row, row_in, o_column2, in2, 8 * M).to(tl.float32)
        mean += tl.sum(do2.to(tl.float32) * o2, axis=1)
        q2 = _load_own(qkv + own * (24 * M), row, row_in, q_column2, in2, own2, 24 * M, EXACT)
        dq2 = tl.zeros([BLOCK, DIM2], tl.float32)
    tl.store(delta + pair * N + first + row, mean, mask=row_in)
    log_total = tl.load(lse + pair * N + first + row, mask=row_in, other=float("inf")) * _LOG2E

    for start in range(0, N, STEP):
        others = tokens + tl.cast(start, tl.int64) * (24 * M)
        step_in = start + step < N
        k1 = _load(others, step, step_in, k_column1, in1, 24 * M)
        v1 = _load(others, step, step_in, v_column1, in1, 24 * M)
        score = tl.dot(q1, tl.trans(k1), input_precision=PRECISION)
        slope = tl.dot(do1, tl.trans(v1), input_precision=PRECISION)
        if DIM2 > 0:
            k2 = _load(others, step, step_in, k_column2, in2, 24 * M)
            v2 = _load(others, step, step_in, v_column2, in2, 24 * M)
            score = tl.dot(q2, tl.trans(k2), score, input_precision=PRECISION)
            slope = tl.dot(do2, tl.trans(v2), slope, input_precision=PRECISION)
        score = tl.where(step_in[None, :], score, -float("inf"))
        weight = tl.math.exp2(score * (SCALE * _LOG2E) - log_total[:, None])
        dscore = (weight * (slope - mean[:, None])).to(dtype)
        dq1 = tl.dot(dscore, k1, dq1, input_precision=PRECISION)
        if DIM2 > 0:
            dq2 = tl.dot(dscore, k2, dq2, input_precision=PRECISION)

    _store(dqkv + own * (24 * M), dq1 * SCALE, row, row_in, q_column1, own1, 24 * M)
    if DIM2 > 0:
        _store(dqkv + own * (24 * M), dq2 * SCALE, row, row_in, q_column2, own2, 24 * M)


@triton.jit(do_not_specialize=["N"])
def _attention_backward_key(
    dout,
    qkv,
    bias,
    lse,
    delta,
    dqkv,
    N,
    SCALE: tl.constexpr,
    M: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    LINE: tl.constexpr,
    PLANE: tl.constexpr,
    UNIT: tl.constexpr,
    DIM1: tl.constexpr,
    DIM2: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Gradients of BLOCK keys and values of one head: dv = Σ_i P_i do_i, dk = Σ_i dS_i (q_i + b_q) / √D.

    Tiles are [keys, queries]. The queries stay as they are stored, so that they go straight from memory to
    the products: their bias enters as b_q · k in the scores and as b_q Σ_i dS_i in dk.
    """
    pair, batch, head, first = _own_block(N, M // CHANNELS, BLOCK)
    EXACT: tl.constexpr = UNIT == GROUP
    dtype: tl.constexpr = qkv.dtype.element_ty
    tokens = qkv + batch * N * (24 * M)
    douts = dout + batch * N * (8 * M)
    row, step = tl.arange(0, BLOCK), tl.arange(0, STEP)
    row_in = first + row < N
    own = (batch * N + first) * (24 * M)

    j1 = tl.arange(0, DIM1)
    block1, place1, in1, own1 = _places(j1, head, M, CHANNELS, GROUP, LINE, PLANE, UNIT)
    q_column1 = _columns(block1, place1, 0, 3, M, GROUP)
    k_column1 = _columns(block1, place1, 1, 3, M, GROUP)
    v_column1 = _columns(block1, place1, 2, 3, M, GROUP)
    o_column1 = _columns(block1, place1, 0, 1, M, GROUP)
    k1 = _load_own(qkv + own, row, row_in, k_column1, in1, own1, 24 * M, EXACT)
    v1 = _load_own(qkv + own, row, row_in, v_column1, in1, own1, 24 * M, EXACT)
    dk1 = tl.zeros([BLOCK, DIM1], tl.float32)
    dv1 = tl.zeros([BLOCK, DIM1], tl.float32)
    if DIM2 > 0:
        j2 = DIM1 + tl.arange(0, DIM2)
        block2, place2, in2, own2 = _places(j2, head, M, CHANNELS, GROUP, LINE, PLANE, UNIT)
        q_column2 = _columns(block2, place2, 0, 3, M, GROUP)
        k_column2 = _columns(block2, place2, 1, 3, M, GROUP)
        v_column2 = _columns(block2, place2, 2, 3, M, GROUP)
        o_column2 = _columns(block2, place2, 0, 1, M, GROUP)
        k2 = _load_own(qkv + own, row, row_in, k_column2, in2, own2, 24 * M, EXACT)
        v2 = _load_own(qkv + own, row, row_in, v_column2, in2, own2, 24 * M, EXACT)
        dk2 = tl.zeros([BLOCK, DIM2], tl.float32)
        dv2 = tl.zeros([BLOCK, DIM2], tl.float32)
    if bias is not None:
        lift = tl.sum(k1.to(tl.float32) * _load_bias(bias, block1, place1, own1), axis=1) * (SCALE * _LOG2E)
        dscore_sum = tl.zeros([BLOCK], tl.float32)

    for start in range(0, N, STEP):
        step_in = start + step < N
        others = tokens + tl.cast(start, tl.int64) * (24 * M)
        q1 = _load(others, step, step_in, q_column1, in1, 24 * M)
        score = tl.dot(k1, tl.trans(q1), input_precision=PRECISION)
        if DIM2 > 0:
            q2 = _load(others, step, step_in, q_column2, in2, 24 * M)
            score = tl.dot(k2, tl.trans(q2), score, input_precision=PRECISION)
        # Queries past the end weigh nothing: exp2(-inf).
        log_total = tl.load(lse + pair * N + start + step, mask=step_in, other=float("inf")) * _LOG2E
        if bias is not None:
            weight = tl.math.exp2(score * (SCALE * _LOG2E) + (lift[:, None] - log_total[None, :]))
        else:
            weight = tl.math.exp2(score * (SCALE * _LOG2E) - log_total[None, :])
        others = douts + tl.cast(start, tl.int64) * (8 * M)
        do1 = _load(others, step, step_in, o_column1, in1, 8 * M)
        slope = tl.dot(v1, tl.trans(do1), input_precision=PRECISION)
        dv1 = tl.dot(weight.to(dtype), do1, dv1, input_precision=PRECISION)
        if DIM2 > 0:
            do2 = _load(others, step, step_in, o_column2, in2, 8 * M)
            slope = tl.dot(v2, tl.trans(do2), slope, input_precision=PRECISION)
            dv2 = tl.dot(weight.to(dtype), do2, dv2, input_precision=PRECISION)
        mean = tl.load(delta + pair * N + start + step, mask=step_in, other=0.0)
        dscore = weight * (slope - mean[None, :])
        if bias is not None:
            dscore_sum += tl.sum(dscore, axis=1)
        dk1 = tl.dot(dscore.to(dtype), q1, dk1, input_precision=PRECISION)
        if DIM2 > 0:
            dk2 = tl.dot(dscore.to(dtype), q2, dk2, input_precision=PRECISION)

    if bias is not None:
        dk1 += dscore_sum[:, None] * _load_bias(bias, block1, place1, own1)
    _store(dqkv + own, dk1 * SCALE, row, row_in, k_column1, own1, 24 * M)
    _store(dqkv + own, dv1, row, row_in, v_column1, own1, 24 * M)
    if DIM2 > 0:
        _store(dqkv + own, dk2 * SCALE, row, row_in, k_column2, own2, 24 * M)
        _store(dqkv + own, dv2, row, row_in, v_column2, own2, 24 * M)


def _chunks(dim: int) -> tuple[int, int]:
    """Powers of two, at least 16, whose sum holds a head of this size: one, or two where that pads less."""
    first = max(16, 1 << (dim.bit_length() - 1))
    if first >= dim:
        return first, 0
    second = max(16, triton.next_power_of_2(dim - first))
    return (first, second) if second < first else (2 * first, 0)


def _tile(tiles: Tiles, element_size: int, dim: int, rows: int) -> tuple[int, int, int, int]:
    by_size = tiles[element_size]
    choice = by_size[next((limit for limit in by_size if dim <= limit), max(by_size))]
    return min(choice, key=lambda tile: triton.cdiv(rows, tile[0]) * tile[0])


def _groups(length: int, group: int) -> int:
    """Aligned groups that hold a head's piece, which starts at a multiple of gcd(length, group)."""
    return triton.cdiv(group - math.gcd(length, group) + length, group)


def _shape(qkv: torch.Tensor, heads: int) -> tuple[int, int, int, dict[str, int | float | str]]:
    """Batch, tokens, padded head size, and what all three kernels are specialised to."""
    batch, tokens, width = qkv.shape
    m = width // 24
    channels = m // heads
    wide = 16 // qkv.element_size()
    # Groups of 16 bytes where the pieces are aligned to them, else of half, which read and pad less in vain.
    group = math.gcd(wide if channels % wide == 0 else wide // 2, m)
    line, plane = _groups(channels, group), _groups(2 * channels, group)
    dim1, dim2 = _chunks((4 * line + 2 * plane) * group)
    meta = {
        "SCALE": (8 * channels) ** -0.5,
        "M": m,
        "CHANNELS": channels,
        "GROUP": group,
        "LINE": line,
        "PLANE": plane,
        "UNIT": math.gcd(channels, group),
        "DIM1": dim1,
        "DIM2": dim2,
        "PRECISION": "ieee" if qkv.dtype == torch.float32 else "tf32",
    }
    return batch, tokens, dim1 + dim2, meta


def attention_forward(
    qkv: torch.Tensor, bias: torch.Tensor | None, heads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over packed qkv[B, N, 3C] with the A1 bias[3C/8] of q, k, v.

    Returns o[B, N, C], packed, and the log-sum-exp of the scaled scores, lse[B, H, N] in float32, without the
    constant that k's bias adds to it.
    """
    batch, tokens, dim, meta = _shape(qkv, heads)
    out = torch.empty((batch, tokens, qkv.shape[2] // 3), dtype=qkv.dtype, device=qkv.device)
    lse = torch.empty((batch, heads, tokens), dtype=torch.float32, device=qkv.device)
    if out.numel() == 0:
        return out, lse
    block, step, warps, stages = _tile(FORWARD_TILES, qkv.element_size(), dim, tokens)
    with torch.cuda.device_of(qkv):
        _attention_forward[(batch * heads * triton.cdiv(tokens, block),)](
            qkv, bias, out, lse, tokens, **meta, BLOCK=block, STEP=step, num_warps=warps, num_stages=stages
        )
    return out, lse


def attention_backward(
    dout: torch.Tensor,
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    heads: int,
) -> torch.Tensor:
    """Gradient dqkv[B, N, 3C] of `attention_forward`, packed; the bias's is the sum of its A1 columns."""
    batch, tokens, dim, meta = _shape(qkv, heads)
    dqkv = torch.empty_like(qkv)
    if dqkv.numel() == 0:
        return dqkv
    delta = torch.empty_like(lse)
    size = qkv.element_size()
    with torch.cuda.device_of(qkv):
        block, step, warps, stages = _tile(QUERY_TILES, size, dim, tokens)
        _attention_backward_query[(batch * heads * triton.cdiv(tokens, block),)](
            dout,
            qkv,
            bias,
            out,
            lse,
            delta,
            dqkv,
            tokens,
            **meta,
            BLOCK=block,
            STEP=step,
            num_warps=warps,
            num_stages=stages,
        )
        block, step, warps, stages = _tile(KEY_TILES, size, dim, tokens)
        _attention_backward_key[(batch * heads * triton.cdiv(tokens, block),)](
            dout,
            qkv,
            bias,
            lse,
            delta,
            dqkv,
            tokens,
            **meta,
            BLOCK=block,
            STEP=step,
            num_warps=warps,
            num_stages=stages,
        )
    return dqkv
