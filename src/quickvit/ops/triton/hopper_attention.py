"""Attention and its gradient on NVIDIA's Hopper, a whole head at a time, for heads of 64 and of 80.

    o_i = Σ_j P_ij v_j,    P = softmax(S),    S = q kᵀ / √D

    dP = do vᵀ,    dS = P (dP - Σ_d o do),    dv = Pᵀ do,    dq = dS k / √D,    dk = dSᵀ q / √D

A program takes one head of one sequence and keeps all that it multiplies with in shared memory, in blocks of 64
tokens: k and v, for the gradient also q and do. Two groups of four warps take blocks in turns, for the gradient first
blocks of queries (dq), then blocks of keys (dk and dv). So S and dP are computed twice, but no sum crosses groups.
What does are two numbers for each query, handed over block by block.

A vector of 80 entries is a tile of 64 and one of 16, and the last block of tokens is cut to TAIL where it is a right
operand: products then do little more than they have to, where general kernels round up to 128 entries and 64 tokens.
q, k, v and do are in heads, as `heads.py` writes them. Without gradients q is packed, and its bias is added here: it
is read once only, so that a copy of it is not worth its while.

A vector of 64 entries is two tiles of 32. q, k and v are RUNS, as `hopper.py` writes them, and do is packed, gathered
in pieces of 16 bytes.

The results go to packed channels, from registers.
"""

import math
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from quickvit.ops.triton.heads import block_of
from quickvit.ops.triton.hopper import _accumulators, _boxes, _load
from quickvit.ops.triton.launch import shared_memory

# By head size: the two parts of a vector.
PARTS: dict[int, tuple[int, int]] = {80: (64, 16), 64: (32, 32)}
SIDE = gl.constexpr(64)
_LOG2E = gl.constexpr(1 / math.log(2))
# Registers of a thread: of two programs on a multiprocessor, and of one.
_FORWARD, _BACKWARD = gl.constexpr(128), gl.constexpr(240)


@gluon.constexpr_function
def _operand(columns):
    """Where entries of the left operand are whose product has so many columns."""
    return gl.DotOperandLayout(operand_index=0, parent=_accumulators(columns), k_width=2)


@gluon.jit
def _nothing(COLUMNS: gl.constexpr):
    return gl.zeros((SIDE, COLUMNS), gl.float32, layout=_accumulators(COLUMNS))


@gluon.jit
def _no_sums(memory):
    """Sums to begin with."""
    wide, rest = _nothing(memory[0].shape[2]), _nothing(memory[1].shape[2])
    return warpgroup_mma_init(wide), warpgroup_mma_init(rest)


@gluon.jit
def _in_memory(memory, block):
    """A block of tokens as a left operand in shared memory."""
    return memory[0].index(block), memory[1].index(block)


@gluon.jit
def _in_registers(memory, block):
    """A block of tokens as a left operand in registers."""
    layout: gl.constexpr = _operand(SIDE)
    return memory[0].index(block).load(layout), memory[1].index(block).load(layout)


@gluon.jit
def _for_columns(rows, COLUMNS: gl.constexpr):
    """The same registers, for a product with so many columns."""
    layout: gl.constexpr = _operand(COLUMNS)
    return gl.convert_layout(rows[0], layout), gl.convert_layout(rows[1], layout)


@gluon.jit
def _begin_scores(rows, memory, chunk, COLUMNS: gl.constexpr):
    """The product of rows with a block of tokens, over the entries of their vectors, begins."""
    total = _nothing(COLUMNS)
    for part in gl.static_range(2):
        right = memory[part].index(chunk).slice(0, COLUMNS).permute((1, 0))
        total = warpgroup_mma(rows[part], right, total, use_acc=part > 0, is_async=True)
    return total


@gluon.jit
def _begin_sums(weights, memory, chunk, sums):
    """The product of weights with a block of tokens, over the tokens, begins to be added to sums."""
    COLUMNS: gl.constexpr = weights.shape[1]
    result = ()
    for part in gl.static_range(2):
        left = gl.convert_layout(weights.to(memory[part].dtype), _operand(memory[part].shape[2]))
        right = memory[part].index(chunk).slice(0, COLUMNS)
        result += (warpgroup_mma(left, right, sums[part], is_async=True),)
    return result


@gluon.jit
def _along_rows(line, values):
    """A number for each row, to be combined with a tile of values."""
    return gl.convert_layout(line, gl.SliceLayout(1, _accumulators(values.shape[1])))[:, None]


@gluon.jit
def _along_columns(memory, block, values):
    """A number for each of a block's tokens, which are the columns of a tile of values."""
    layout: gl.constexpr = gl.SliceLayout(0, _accumulators(values.shape[1]))
    return memory.index(block).slice(0, values.shape[1]).load(layout)[None, :]


@gluon.jit
def _without(scores, chunk, N):
    """Scores of keys less those past the end."""
    COLUMNS: gl.constexpr = scores.shape[1]
    key = chunk * SIDE + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, _accumulators(COLUMNS)))
    return gl.where((key < N)[None, :], scores, -float("inf"))


@gluon.jit
def _clear(memory, N):
    """Tokens past the end, which are the next sequence's, become zero: they may not be finite, and weights of zero
    would not help."""
    _clear_part(memory[0], N)
    _clear_part(memory[1], N)


@gluon.jit
def _clear_part(memory, N):
    layout: gl.constexpr = _accumulators(memory.shape[2])
    BLOCKS: gl.constexpr = memory.shape[0]
    last = memory.index(BLOCKS - 1)
    values = last.load(layout)
    inside = (_tokens(BLOCKS - 1, layout) < N)[:, None]
    last.store(gl.where(inside, values, 0.0).to(values.dtype))


@gluon.jit
def _tokens(block, LAYOUT: gl.constexpr):
    return block * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, LAYOUT))


@gluon.jit
def _packed(
    feature,
    block,
    head,
    START: gl.constexpr,
    COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
    VECTOR: gl.constexpr,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
):
    """Where a block of tokens has a head's entries from START on, in one of the PARTS that a packed feature has.

    VECTOR neighbours lie side by side.
    """
    d = START + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, LAYOUT))
    first = block_of(d, c)
    length = gl.where(d < 4 * c, c, 2 * c)
    column = first * (PARTS * HEADS * c) + (PART * HEADS + head) * length + d - first * c
    column = gl.max_contiguous(gl.multiple_of(column, VECTOR), VECTOR)
    token = _tokens(block, LAYOUT).to(gl.int64)
    return feature + token[:, None] * (PARTS * 8 * HEADS * c) + column[None, :]


@gluon.jit
def _put(
    feature,
    values,
    block,
    N,
    head,
    START: gl.constexpr,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
):
    """Store the entries from START on of a block of tokens."""
    COLUMNS: gl.constexpr = values.shape[1]
    layout: gl.constexpr = _accumulators(COLUMNS)
    place = _packed(feature, block, head, START, COLUMNS, layout, 2, PART, PARTS, HEADS, c)
    gl.store(place, values.to(feature.dtype.element_ty), mask=(_tokens(block, layout) < N)[:, None])


@gluon.jit
def _put_both(
    feature,
    wide,
    rest,
    block,
    N,
    head,
    PART: gl.constexpr,
    PARTS: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
):
    """Store both tiles of the vectors of a block of tokens."""
    _put(feature, wide, block, N, head, 0, PART, PARTS, HEADS, c)
    _put(feature, rest, block, N, head, wide.shape[1], PART, PARTS, HEADS, c)


@gluon.constexpr_function
def _column(feature, part, wide, heads, c, runs):
    """Where a part of q, k, v or do of the first head begins."""
    return (3 * part + feature) * 4 * heads * c if runs else part * wide


@gluon.constexpr_function
def _stride(c, runs):
    """How far apart heads are."""
    return 4 * c if runs else 8 * c


@gluon.jit
def _queries(q, block, N, STRIDE: gl.constexpr, COLUMNS: gl.constexpr):
    """A part of a block of queries, of tokens STRIDE apart, as a left operand in registers; zero past the end."""
    layout: gl.constexpr = _accumulators(COLUMNS)
    d = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    token = _tokens(block, layout)
    place = q + token.to(gl.int64)[:, None] * STRIDE + d[None, :]
    return gl.convert_layout(gl.load(place, mask=(token < N)[:, None], other=0.0), _operand(SIDE))


@gluon.jit
def _packed_queries(
    qkv,
    bias,
    block,
    N,
    head,
    START: gl.constexpr,
    COLUMNS: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
):
    """The same of packed q, k and v, with the bias of q added."""
    layout: gl.constexpr = _accumulators(COLUMNS)
    values = _part(qkv, block, N, head, START, COLUMNS, layout, 2, 3, HEADS, c)
    if bias is not None and START == 0:
        d = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
        shift = gl.load(bias + head * c + d, mask=d < c, other=0.0).to(gl.float32)
        values = (values.to(gl.float32) + shift[None, :]).to(values.dtype)
    return gl.convert_layout(values, _operand(SIDE))


@gluon.jit
def _attend(queries, tiles, state, chunk, N, COLUMNS: gl.constexpr, SCALE: gl.constexpr):
    """Add a block of keys to the largest score, Σ weights and Σ weights · v; N says where keys end, if they may."""
    k, v = tiles
    largest, total, wide, rest = state
    line: gl.constexpr = gl.SliceLayout(1, _accumulators(SIDE))
    score = _begin_scores(_for_columns(queries, COLUMNS), k, chunk, COLUMNS)
    score = warpgroup_mma_wait(0, deps=(score,))
    if N is not None:
        score = _without(score, chunk, N)
    larger = gl.maximum(largest, gl.convert_layout(gl.max(score, axis=1), line) * SCALE)
    shrink = gl.exp2(largest - larger)
    weight = gl.exp2(gl.fma(score, SCALE, -_along_rows(larger, score)))
    total = total * shrink + gl.convert_layout(gl.sum(weight, axis=1), line)
    wide = wide * _along_rows(shrink, wide)
    rest = rest * _along_rows(shrink, rest)
    wide, rest = _begin_sums(weight, v, chunk, (wide, rest))
    wide, rest = warpgroup_mma_wait(0, deps=(wide, rest))
    return larger, total, wide, rest


@gluon.jit
def _forward(
    boxes,
    tiles,
    loaded,
    q,
    bias,
    out,
    logs,
    origin,
    N,
    GROUP: gl.constexpr,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
    RUNS: gl.constexpr,
):
    """Every other block of queries."""
    k, v = tiles
    SCALE: gl.constexpr = _LOG2E / (8 * c) ** 0.5
    WIDE: gl.constexpr = k[0].shape[2]
    REST: gl.constexpr = k[1].shape[2]
    line: gl.constexpr = gl.SliceLayout(1, _accumulators(SIDE))
    STRIDE: gl.constexpr = 24 * HEADS * c if RUNS else 8 * HEADS * c
    head = gl.program_id(0) % HEADS
    row = gl.program_id(0) // HEADS * N
    # Heads are of this batch alone.
    place = origin + row if RUNS else row
    if GROUP == 0:
        _load_features(boxes, tiles, 1, 3, loaded[0], place, head, BLOCKS, HEADS, c, RUNS)
    else:
        # Scores of keys past the end are masked.
        mbarrier.wait(loaded[0], 0)
        _clear(v, N)
        fence_async_shared()
        mbarrier.arrive(loaded[1], count=1)
    if logs is None:
        q += gl.cast(origin + row, gl.int64) * (24 * HEADS * c)
    else:
        q += gl.cast(place, gl.int64) * STRIDE + head * _stride(c, RUNS)
        logs += gl.program_id(0) * N
    out += gl.cast(origin + row, gl.int64) * (8 * HEADS * c)
    for block in range(GROUP, BLOCKS, 2):
        if logs is None:
            queries = (
                _packed_queries(q, bias, block, N, head, 0, WIDE, HEADS, c),
                _packed_queries(q, bias, block, N, head, WIDE, REST, HEADS, c),
            )
        else:
            queries = (
                _queries(q + _column(0, 0, WIDE, HEADS, c, RUNS), block, N, STRIDE, WIDE),
                _queries(q + _column(0, 1, WIDE, HEADS, c, RUNS), block, N, STRIDE, REST),
            )
        largest = gl.full((SIDE,), -float("inf"), gl.float32, layout=line)
        total = gl.zeros((SIDE,), gl.float32, layout=line)
        wide, rest = _nothing(v[0].shape[2]), _nothing(v[1].shape[2])
        state = largest, total, wide, rest
        mbarrier.wait(loaded[0], 0)
        mbarrier.wait(loaded[1], 0)
        for chunk in range(BLOCKS - 1):
            state = _attend(queries, tiles, state, chunk, None, SIDE, SCALE)
        largest, total, wide, rest = _attend(queries, tiles, state, BLOCKS - 1, N, TAIL, SCALE)
        if logs is not None:
            token = _tokens(block, _accumulators(SIDE))
            gl.store(logs + token, largest + gl.log2(total), mask=token < N)
        share = 1 / total
        wide *= _along_rows(share, wide)
        rest *= _along_rows(share, rest)
        _put_both(out, wide, rest, block, N, head, 0, 1, HEADS, c)


@gluon.jit
def _part(
    feature,
    block,
    N,
    head,
    START: gl.constexpr,
    COLUMNS: gl.constexpr,
    LAYOUT: gl.constexpr,
    VECTOR: gl.constexpr,
    PARTS: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
):
    """Entries from START on of a block of tokens, in the first part of a packed feature; zero past the end."""
    place = _packed(feature, block, head, START, COLUMNS, LAYOUT, VECTOR, 0, PARTS, HEADS, c)
    return gl.load(place, mask=(_tokens(block, LAYOUT) < N)[:, None], other=0.0)


@gluon.jit
def _results(
    out,
    dout,
    logs,
    block,
    N,
    head,
    WIDE: gl.constexpr,
    REST: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
):
    """The results of a block of queries in two parts, their logarithms, and if dout is packed, that in two parts."""
    token = _tokens(block, _accumulators(SIDE))
    results = (
        _part(out, block, N, head, 0, WIDE, _accumulators(WIDE), 2, 1, HEADS, c),
        _part(out, block, N, head, WIDE, REST, _accumulators(REST), 2, 1, HEADS, c),
        # Queries past the end have no part in anything.
        gl.load(logs + token, mask=token < N, other=float("inf")),
    )
    if dout is not None:
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
        results += (
            _part(dout, block, N, head, 0, WIDE, layout, 8, 1, HEADS, c),
            _part(dout, block, N, head, WIDE, REST, layout, 8, 1, HEADS, c),
        )
    return results


@gluon.jit
def _dots(o, do, block):
    """Σ o do over the entries of a part, for a block of tokens."""
    line: gl.constexpr = gl.SliceLayout(1, _accumulators(SIDE))
    gradients = do.index(block).load(_accumulators(do.shape[2])).to(gl.float32)
    return gl.convert_layout(gl.sum(o.to(gl.float32) * gradients, axis=1), line)


@gluon.jit
def _add_to_dq(dq, rows, k, v, log, mean, chunk, N, COLUMNS: gl.constexpr, SCALE: gl.constexpr):
    """The part that a block of keys has in dq; what is added goes on while the next begins."""
    score = _begin_scores(_for_columns(rows[0], COLUMNS), k, chunk, COLUMNS)
    slope = _begin_scores(_for_columns(rows[1], COLUMNS), v, chunk, COLUMNS)
    score = warpgroup_mma_wait(2, deps=(score,))
    if N is not None:
        score = _without(score, chunk, N)
    weight = gl.exp2(gl.fma(score, SCALE, -_along_rows(log, score)))
    slope = warpgroup_mma_wait(0, deps=(slope,))
    return _begin_sums(weight * (slope - _along_rows(mean, slope)), k, chunk, dq)


@gluon.jit
def _of_queries(
    tiles,
    handed,
    results,
    dqkv,
    N,
    head,
    block,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
):
    """dq of a block of queries, and what keys ask of them: log2 Σ_j exp2(S) and Σ_d o do."""
    q, k, v, do = tiles
    all_logs, all_means, done = handed
    SCALE: gl.constexpr = _LOG2E / (8 * c) ** 0.5
    FACTOR: gl.constexpr = 1 / (8 * c) ** 0.5
    log = results[2]
    if len(results) > 3:
        do[0].index(block).store(results[3])
        do[1].index(block).store(results[4])
        fence_async_shared()
    mean = _dots(results[0], do[0], block) + _dots(results[1], do[1], block)
    all_logs.index(block).store(log)
    all_means.index(block).store(mean)
    mbarrier.arrive(done.index(block), count=1)
    dq = _no_sums(k)
    rows = _in_registers(q, block), _in_registers(do, block)
    for chunk in range(BLOCKS - 1):
        dq = _add_to_dq(dq, rows, k, v, log, mean, chunk, None, SIDE, SCALE)
    dq = _add_to_dq(dq, rows, k, v, log, mean, BLOCKS - 1, N, TAIL, SCALE)
    wide, rest = warpgroup_mma_wait(0, deps=dq)
    _put_both(dqkv, wide * FACTOR, rest * FACTOR, block, N, head, 0, 3, HEADS, c)


@gluon.jit
def _add_to_dk_and_dv(dk, dv, rows, q, do, handed, chunk, COLUMNS: gl.constexpr, SCALE: gl.constexpr):
    """The part that a block of queries has in dk and dv; what is added goes on while the next begins."""
    logs, means, done = handed
    score = _begin_scores(rows[0], q, chunk, COLUMNS)
    slope = _begin_scores(rows[1], do, chunk, COLUMNS)
    mbarrier.wait(done.index(chunk), 0)
    score = warpgroup_mma_wait(2, deps=(score,))
    weight = gl.exp2(gl.fma(score, SCALE, -_along_columns(logs, chunk, score)))
    dv = _begin_sums(weight, do, chunk, dv)
    slope = warpgroup_mma_wait(2, deps=(slope,))
    dk = _begin_sums(weight * (slope - _along_columns(means, chunk, slope)), q, chunk, dk)
    return dk, dv


@gluon.jit
def _of_keys(
    tiles,
    handed,
    dqkv,
    N,
    head,
    block,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
):
    """dk and dv of a block of keys."""
    SCALE: gl.constexpr = _LOG2E / (8 * c) ** 0.5
    FACTOR: gl.constexpr = 1 / (8 * c) ** 0.5
    q, k, v, do = tiles
    dk = _no_sums(q)
    dv = _no_sums(do)
    # Registers are for the sums here.
    rows = _in_memory(k, block), _in_memory(v, block)
    for chunk in range(BLOCKS - 1):
        dk, dv = _add_to_dk_and_dv(dk, dv, rows, q, do, handed, chunk, SIDE, SCALE)
    dk, dv = _add_to_dk_and_dv(dk, dv, rows, q, do, handed, BLOCKS - 1, TAIL, SCALE)
    dv, dv_rest, dk, dk_rest = warpgroup_mma_wait(0, deps=dv + dk)
    _put_both(dqkv, dk * FACTOR, dk_rest * FACTOR, block, N, head, 1, 3, HEADS, c)
    _put_both(dqkv, dv, dv_rest, block, N, head, 2, 3, HEADS, c)


@gluon.jit
def _load_features(
    boxes,
    tiles,
    FIRST: gl.constexpr,
    END: gl.constexpr,
    barrier,
    row,
    head,
    BLOCKS: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
    RUNS: gl.constexpr,
):
    """All blocks of the features from FIRST on of q, k, v and do, which are those of `boxes`, begin to be loaded."""
    WIDE: gl.constexpr = tiles[0][0].shape[2]
    mbarrier.expect(barrier, (END - FIRST) * BLOCKS * SIDE * 8 * c * 2)
    for block in gl.static_range(BLOCKS):
        for feature in gl.static_range(FIRST, END):
            for part in gl.static_range(2):
                column = _column(feature, part, WIDE, HEADS, c, RUNS) + head * _stride(c, RUNS)
                memory = tiles[feature - FIRST][part].index(block)
                _load(boxes[feature - FIRST][part], [row + block * SIDE, column], barrier, memory)


@gluon.jit
def _backward(
    boxes,
    tiles,
    loaded,
    handed,
    out,
    dout,
    logs,
    dqkv,
    origin,
    N,
    GROUP: gl.constexpr,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
    RUNS: gl.constexpr,
):
    """A group's blocks: of queries every other one, of keys the others, so that nobody has the odd one twice."""
    head = gl.program_id(0) % HEADS
    row = gl.program_id(0) // HEADS * N
    if GROUP == 0:
        q, k, v, do = boxes
        place = origin + row if RUNS else row
        _load_features((q, k), (tiles[0], tiles[1]), 0, 2, loaded[0], place, head, BLOCKS, HEADS, c, RUNS)
        if RUNS:
            _load_features((v,), (tiles[2],), 2, 3, loaded[1], place, head, BLOCKS, HEADS, c, RUNS)
        else:
            _load_features(
                (v, do), (tiles[2], tiles[3]), 2, 4, loaded[1], place, head, BLOCKS, HEADS, c, RUNS
            )
    out += gl.cast(origin + row, gl.int64) * (8 * HEADS * c)
    if dout is not None:
        dout += gl.cast(origin + row, gl.int64) * (8 * HEADS * c)
    dqkv += gl.cast(origin + row, gl.int64) * (24 * HEADS * c)
    logs += gl.program_id(0) * N
    WIDE: gl.constexpr = tiles[0][0].shape[2]
    REST: gl.constexpr = tiles[0][1].shape[2]
    following = _results(out, dout, logs, GROUP, N, head, WIDE, REST, HEADS, c)
    mbarrier.wait(loaded[0], 0)
    mbarrier.wait(loaded[1], 0)
    if GROUP == 0:
        _clear(tiles[0], N)
        _clear(tiles[1], N)
    else:
        _clear(tiles[2], N)
        # Packed gradients are zero past the end when they are gathered.
        if not RUNS:
            _clear(tiles[3], N)
    fence_async_shared()
    mbarrier.arrive(loaded[2 + GROUP], count=1)
    mbarrier.wait(loaded[3 - GROUP], 0)
    for block in range(GROUP, BLOCKS, 2):
        results = following
        following = _results(out, dout, logs, block + 2, N, head, WIDE, REST, HEADS, c)
        _of_queries(tiles, handed, results, dqkv, N, head, block, BLOCKS, TAIL, HEADS, c)
    for block in range(1 - GROUP, BLOCKS, 2):
        _of_keys(tiles, handed, dqkv, N, head, block, BLOCKS, TAIL, HEADS, c)


@gluon.jit
def _allocate(boxes, BLOCKS: gl.constexpr):
    """Shared memory for all blocks of one part of a feature."""
    return gl.allocate_shared_memory(boxes.dtype, [BLOCKS, SIDE, boxes.block_type.shape[1]], boxes.layout)


@gluon.jit
def _barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit(do_not_specialize=["origin", "N"])
def _attention(
    k,
    k_rest,
    v,
    v_rest,
    q,
    bias,
    out,
    logs,
    origin,
    N,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
    RUNS: gl.constexpr,
):
    """The result of one head, and log2 Σ_j exp2(S); sequences of N tokens begin at token `origin` of out."""
    boxes = ((k, k_rest), (v, v_rest))
    tiles = (
        (_allocate(k, BLOCKS), _allocate(k_rest, BLOCKS)),
        (_allocate(v, BLOCKS), _allocate(v_rest, BLOCKS)),
    )
    loaded = _barrier(), _barrier()
    gl.warp_specialize(
        [
            (
                _forward,
                (boxes, tiles, loaded, q, bias, out, logs, origin, N, 0, BLOCKS, TAIL, HEADS, c, RUNS),
            ),
            (
                _forward,
                (boxes, tiles, loaded, q, bias, out, logs, origin, N, 1, BLOCKS, TAIL, HEADS, c, RUNS),
            ),
        ],
        [4],
        [_FORWARD],
    )


@gluon.jit(do_not_specialize=["origin", "N"])
def _attention_gradient(
    q,
    q_rest,
    k,
    k_rest,
    v,
    v_rest,
    do,
    do_rest,
    out,
    dout,
    logs,
    dqkv,
    origin,
    N,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    c: gl.constexpr,
    RUNS: gl.constexpr,
):
    """The gradients of a head's q, k and v; sequences of N tokens begin at token `origin` of out and of dqkv."""
    boxes = ((q, q_rest), (k, k_rest), (v, v_rest), (do, do_rest))
    tiles = ()
    for feature in gl.static_range(4):
        tiles += ((_allocate(boxes[feature][0], BLOCKS), _allocate(boxes[feature][1], BLOCKS)),)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    all_logs = gl.allocate_shared_memory(gl.float32, [BLOCKS, SIDE], line)
    all_means = gl.allocate_shared_memory(gl.float32, [BLOCKS, SIDE], line)
    done = gl.allocate_shared_memory(gl.int64, [BLOCKS, 1], mbarrier.MBarrierLayout())
    for block in gl.static_range(BLOCKS):
        mbarrier.init(done.index(block), count=1)
    loaded = _barrier(), _barrier(), _barrier(), _barrier()
    handed = all_logs, all_means, done
    gl.warp_specialize(
        [
            (
                _backward,
                (
                    boxes,
                    tiles,
                    loaded,
                    handed,
                    out,
                    dout,
                    logs,
                    dqkv,
                    origin,
                    N,
                    0,
                    BLOCKS,
                    TAIL,
                    HEADS,
                    c,
                    RUNS,
                ),
            ),
            (
                _backward,
                (
                    boxes,
                    tiles,
                    loaded,
                    handed,
                    out,
                    dout,
                    logs,
                    dqkv,
                    origin,
                    N,
                    1,
                    BLOCKS,
                    TAIL,
                    HEADS,
                    c,
                    RUNS,
                ),
            ),
        ],
        [4],
        [_BACKWARD],
    )


@cache
def most_tokens(device: torch.device, dtype: torch.dtype, dim: int) -> int:
    """Sequences of how many tokens there is room for with heads of this size, 0 without kernels for them."""
    if dim not in PARTS or dtype.itemsize != 2:
        return 0
    # Of q, k, v and do two bytes an entry, of each query two numbers.
    return (shared_memory(device) - 1024) // (64 * (4 * 2 * dim + 2 * 4)) * 64


def _sizes(length: int, heads: int, dim: int, runs: bool) -> dict[str, int]:
    blocks = -(-length // 64)
    tail = length - 64 * (blocks - 1)
    return {
        "BLOCKS": blocks,
        "TAIL": max(16, 1 << (tail - 1).bit_length()),
        "HEADS": heads,
        "c": dim // 8,
        "RUNS": runs,
        "num_warps": 4,
    }


def _forward_sizes(*sizes: int) -> dict[str, int]:
    return {**_sizes(*sizes), "maxnreg": _FORWARD.value}


def _backward_sizes(*sizes: int) -> dict[str, int]:
    return {**_sizes(*sizes), "maxnreg": _BACKWARD.value}


def _boxes_of(*features: torch.Tensor) -> list[object]:
    """Both parts of features [B, N, H, D] in blocks of 64 tokens."""
    rows = [x.view(-1, x.shape[2] * x.shape[3]) for x in features]
    return [_boxes(x, (64, part)) for x in rows for part in PARTS[features[0].shape[3]]]


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, origin: int
) -> torch.Tensor:
    """Attention of q, k, v [B, N, H, D], written to packed out[T, C] from token `origin` on; what gradients need."""
    number, length, heads, dim = q.shape
    logs = torch.empty((number, heads, length), dtype=torch.float32, device=q.device)
    if number * length:
        with torch.cuda.device_of(q):
            _attention[(number * heads,)](
                *_boxes_of(k, v),
                q,
                None,
                out,
                logs,
                origin,
                length,
                **_forward_sizes(length, heads, dim, False),
            )
    return logs


def attention_without_gradients(
    qkv: torch.Tensor,
    bias: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    origin: int,
) -> None:
    """The same with q from the tokens from `origin` on of packed qkv[T, 3C], to which its A1 bias is added."""
    number, length, heads, dim = k.shape
    if number * length:
        sizes = _forward_sizes(length, heads, dim, False)
        with torch.cuda.device_of(qkv):
            _attention[(number * heads,)](*_boxes_of(k, v), qkv, bias, out, None, origin, length, **sizes)


def attention_forward_of_runs(
    qkv: torch.Tensor, out: torch.Tensor, logs: torch.Tensor, heads: int, shape: tuple[int, int], origin: int
) -> None:
    """The same of the tokens from `origin` on of qkv[T, 3C] in runs; logs[B H N] are what gradients need."""
    number, length = shape
    dim = out.shape[1] // heads
    if number * length:
        boxes = [_boxes(qkv, (64, part)) for part in PARTS[dim]]
        with torch.cuda.device_of(qkv):
            _attention[(number * heads,)](
                *boxes,
                *boxes,
                qkv,
                None,
                out,
                logs,
                origin,
                length,
                **_forward_sizes(length, heads, dim, True),
            )


def attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor,
    dqkv: torch.Tensor,
    origin: int,
) -> None:
    """The gradient of `attention_forward`, from dout [B, N, H, D], written to packed dqkv[T, 3C] likewise."""
    number, length, heads, dim = q.shape
    if number * length:
        sizes = _backward_sizes(length, heads, dim, False)
        with torch.cuda.device_of(q):
            _attention_gradient[(number * heads,)](
                *_boxes_of(q, k, v, dout), out, None, logs, dqkv, origin, length, **sizes
            )


def attention_backward_of_runs(
    dout: torch.Tensor,
    qkv: torch.Tensor,
    out: torch.Tensor,
    logs: torch.Tensor,
    dqkv: torch.Tensor,
    heads: int,
    shape: tuple[int, int],
    origin: int,
) -> None:
    """The gradient of `attention_forward_of_runs`, from packed dout[T, C], written to packed dqkv[T, 3C]."""
    number, length = shape
    dim = out.shape[1] // heads
    if number * length:
        boxes = [_boxes(qkv, (64, part)) for part in PARTS[dim]]
        sizes = _backward_sizes(length, heads, dim, True)
        with torch.cuda.device_of(qkv):
            _attention_gradient[(number * heads,)](
                *boxes, *boxes, *boxes, *boxes, out, dout, logs, dqkv, origin, length, **sizes
            )
