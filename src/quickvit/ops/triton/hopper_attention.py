"""Attention and its gradient on NVIDIA's Hopper, a whole head at a time, for heads of 80.

    o_i = Σ_j P_ij v_j,    P = softmax(S),    S = q kᵀ / √D

    dP = do vᵀ,    dS = P (dP - Σ_d o do),    dv = Pᵀ do,    dq = dS k / √D,    dk = dSᵀ q / √D

A program takes one head of one sequence and keeps all that it multiplies with in shared memory, in blocks of 64
tokens: k and v, for the gradient also q and do. Two groups of four warps take blocks in turns, for the gradient first
blocks of queries (dq), then blocks of keys (dk and dv). So S and dP are computed twice, but no sum crosses groups.
What does are two numbers for each query, handed over block by block.

A vector of 80 entries is a tile of 64 and one of 16, and the last block of tokens is cut to TAIL where it is a right
operand: products then do little more than they have to, where general kernels round up to 128 entries and 64 tokens.

Octic features are heads in PAIRS, see `heads.py`; those of standard blocks have their entries in order. From a token
of q, k, v, or one of their gradients, to the next are ROW entries.
"""

import math
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from quickvit.ops.triton.boxes import accumulators, in_boxes, load_box, view_as
from quickvit.ops.triton.launch import shared_memory

# By head size: the two parts of a vector.
PARTS: dict[int, tuple[int, int]] = {80: (64, 16)}
SIDE = gl.constexpr(64)
_LOG2E = gl.constexpr(1 / math.log(2))
# Registers of a thread: of two programs on a multiprocessor, and of one.
_FORWARD, _BACKWARD = gl.constexpr(128), gl.constexpr(240)


@gluon.constexpr_function
def _operand(columns):
    """Where entries of the left operand are whose product has so many columns."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulators(columns), k_width=2)


@gluon.jit
def _nothing(COLUMNS: gl.constexpr):
    return gl.zeros((SIDE, COLUMNS), gl.float32, layout=accumulators(COLUMNS))


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
    return gl.convert_layout(line, gl.SliceLayout(1, accumulators(values.shape[1])))[:, None]


@gluon.jit
def _along_columns(memory, block, values):
    """A number for each of a block's tokens, which are the columns of a tile of values."""
    layout: gl.constexpr = gl.SliceLayout(0, accumulators(values.shape[1]))
    return memory.index(block).slice(0, values.shape[1]).load(layout)[None, :]


@gluon.jit
def _without(scores, chunk, N):
    """Scores of keys less those past the end."""
    COLUMNS: gl.constexpr = scores.shape[1]
    key = chunk * SIDE + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, accumulators(COLUMNS)))
    return gl.where((key < N)[None, :], scores, -float("inf"))


@gluon.jit
def _tokens(block, COLUMNS: gl.constexpr):
    return block * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, accumulators(COLUMNS)))


@gluon.constexpr_function
def _four_each(columns):
    """Where entries are if each thread has four neighbours, and four threads 32 bytes."""
    rest = [[0, 16], [0, 32]] if columns == 64 else []
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *rest, [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def _place(feature, block, COLUMNS: gl.constexpr, ROW: gl.constexpr):
    """Where a block of tokens has entries of a head, and which tokens."""
    layout: gl.constexpr = _four_each(COLUMNS)
    token = block * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))
    entry = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    return feature + token.to(gl.int64)[:, None] * ROW + entry[None, :], token[:, None]


@gluon.jit
def _put_part(feature, value, block, N, ROW: gl.constexpr, PAIRS: gl.constexpr):
    COLUMNS: gl.constexpr = value.shape[1]
    place, token = _place(feature, block, COLUMNS, ROW)
    value = value.to(feature.dtype.element_ty)
    if PAIRS:
        # Without moving anything: a thread's pairs are side by side.
        pairs = value.reshape([SIDE, COLUMNS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
        value = pairs.reshape([SIDE, COLUMNS])
    gl.store(place, gl.convert_layout(value, _four_each(COLUMNS)), mask=token < N)


@gluon.jit
def _put(feature, values, block, N, ROW: gl.constexpr, PAIRS: gl.constexpr):
    """Store both tiles of the vectors of a block of tokens."""
    wide, rest = values
    _put_part(feature, wide, block, N, ROW, PAIRS)
    _put_part(feature + wide.shape[1], rest, block, N, ROW, PAIRS)


@gluon.jit
def _get_part(feature, block, N, COLUMNS: gl.constexpr, ROW: gl.constexpr, PAIRS: gl.constexpr):
    """The inverse of `_put_part`; zero past the end."""
    place, token = _place(feature, block, COLUMNS, ROW)
    value = gl.load(place, mask=token < N, other=0.0)
    if PAIRS:
        pairs = value.reshape([SIDE, COLUMNS // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4])
        value = pairs.reshape([SIDE, COLUMNS])
    return gl.convert_layout(value, accumulators(COLUMNS))


@gluon.jit
def _queries(q, block, N, WIDE: gl.constexpr, REST: gl.constexpr, ROW: gl.constexpr):
    """A block of queries as a left operand in registers; zero past the end."""
    return _part_of_queries(q, block, N, WIDE, ROW), _part_of_queries(q + WIDE, block, N, REST, ROW)


@gluon.jit
def _part_of_queries(q, block, N, COLUMNS: gl.constexpr, ROW: gl.constexpr):
    d = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, accumulators(COLUMNS)))
    token = _tokens(block, COLUMNS)
    place = q + token.to(gl.int64)[:, None] * ROW + d[None, :]
    return gl.convert_layout(gl.load(place, mask=(token < N)[:, None], other=0.0), _operand(SIDE))


@gluon.jit
def _attend(queries, tiles, state, chunk, N, COLUMNS: gl.constexpr, SCALE: gl.constexpr):
    """Add a block of keys to the largest score, Σ weights and Σ weights · v; N says where keys end, if they may."""
    k, v = tiles
    largest, total, wide, rest = state
    line: gl.constexpr = gl.SliceLayout(1, accumulators(SIDE))
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
    out,
    logs,
    N,
    GROUP: gl.constexpr,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    ROW: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """Every other block of queries."""
    k, v = tiles
    SCALE: gl.constexpr = _LOG2E / DIM**0.5
    WIDE: gl.constexpr = k[0].shape[2]
    REST: gl.constexpr = k[1].shape[2]
    line: gl.constexpr = gl.SliceLayout(1, accumulators(SIDE))
    head = gl.program_id(0) % HEADS
    sequence = gl.program_id(0) // HEADS
    if GROUP == 0:
        _load_all(boxes, tiles, loaded, sequence, head * DIM, BLOCKS)
    before = gl.cast(sequence * N, gl.int64)
    q += before * ROW + head * DIM
    out += before * (HEADS * DIM) + head * DIM
    logs += gl.program_id(0) * N
    for block in range(GROUP, BLOCKS, 2):
        queries = _queries(q, block, N, WIDE, REST, ROW)
        largest = gl.full((SIDE,), -float("inf"), gl.float32, layout=line)
        total = gl.zeros((SIDE,), gl.float32, layout=line)
        wide, rest = _nothing(v[0].shape[2]), _nothing(v[1].shape[2])
        state = largest, total, wide, rest
        mbarrier.wait(loaded, 0)
        for chunk in range(BLOCKS - 1):
            state = _attend(queries, tiles, state, chunk, None, SIDE, SCALE)
        largest, total, wide, rest = _attend(queries, tiles, state, BLOCKS - 1, N, TAIL, SCALE)
        token = _tokens(block, SIDE)
        gl.store(logs + token, largest + gl.log2(total), mask=token < N)
        share = 1 / total
        wide *= _along_rows(share, wide)
        rest *= _along_rows(share, rest)
        _put(out, (wide, rest), block, N, HEADS * DIM, PAIRS)


@gluon.jit
def _results(
    out, logs, block, N, WIDE: gl.constexpr, REST: gl.constexpr, ROW: gl.constexpr, PAIRS: gl.constexpr
):
    """Both parts of the results of a block of queries, and their logarithms."""
    token = _tokens(block, SIDE)
    return (
        _get_part(out, block, N, WIDE, ROW, PAIRS),
        _get_part(out + WIDE, block, N, REST, ROW, PAIRS),
        # Queries past the end have no part in anything.
        gl.load(logs + token, mask=token < N, other=float("inf")),
    )


@gluon.jit
def _dots(o, do, block):
    """Σ o do over the entries of a part, for a block of tokens."""
    line: gl.constexpr = gl.SliceLayout(1, accumulators(SIDE))
    gradients = do.index(block).load(accumulators(do.shape[2])).to(gl.float32)
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
    dq_out,
    N,
    block,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    DIM: gl.constexpr,
    ROW: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """dq of a block of queries, and what keys ask of them: log2 Σ_j exp2(S) and Σ_d o do."""
    q, k, v, do = tiles
    all_logs, all_means, done = handed
    SCALE: gl.constexpr = _LOG2E / DIM**0.5
    FACTOR: gl.constexpr = 1 / DIM**0.5
    wide, rest, log = results
    mean = _dots(wide, do[0], block) + _dots(rest, do[1], block)
    all_logs.index(block).store(log)
    all_means.index(block).store(mean)
    mbarrier.arrive(done.index(block), count=1)
    dq = _no_sums(k)
    rows = _in_registers(q, block), _in_registers(do, block)
    for chunk in range(BLOCKS - 1):
        dq = _add_to_dq(dq, rows, k, v, log, mean, chunk, None, SIDE, SCALE)
    dq = _add_to_dq(dq, rows, k, v, log, mean, BLOCKS - 1, N, TAIL, SCALE)
    wide, rest = warpgroup_mma_wait(0, deps=dq)
    _put(dq_out, (wide * FACTOR, rest * FACTOR), block, N, ROW, PAIRS)


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
    dk_out,
    dv_out,
    N,
    block,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    DIM: gl.constexpr,
    ROW: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """dk and dv of a block of keys."""
    SCALE: gl.constexpr = _LOG2E / DIM**0.5
    FACTOR: gl.constexpr = 1 / DIM**0.5
    q, k, v, do = tiles
    dk = _no_sums(q)
    dv = _no_sums(do)
    # Registers are for the sums here.
    rows = _in_memory(k, block), _in_memory(v, block)
    for chunk in range(BLOCKS - 1):
        dk, dv = _add_to_dk_and_dv(dk, dv, rows, q, do, handed, chunk, SIDE, SCALE)
    dk, dv = _add_to_dk_and_dv(dk, dv, rows, q, do, handed, BLOCKS - 1, TAIL, SCALE)
    dv, dv_rest, dk, dk_rest = warpgroup_mma_wait(0, deps=dv + dk)
    _put(dk_out, (dk * FACTOR, dk_rest * FACTOR), block, N, ROW, PAIRS)
    _put(dv_out, (dv, dv_rest), block, N, ROW, PAIRS)


@gluon.jit
def _load_all(boxes, tiles, barrier, sequence, column, BLOCKS: gl.constexpr):
    """All blocks of two features begin to be loaded; past the end of the sequence they are zero."""
    WIDE: gl.constexpr = tiles[0][0].shape[2]
    mbarrier.expect(barrier, 2 * BLOCKS * SIDE * (WIDE + tiles[0][1].shape[2]) * 2)
    for block in gl.static_range(BLOCKS):
        for feature in gl.static_range(2):
            for part in gl.static_range(2):
                source, target = boxes[feature][part], tiles[feature][part].index(block)
                target = view_as(target, target.dtype, source.block_type.shape, source.layout)
                load_box(source, [sequence, block * SIDE, column + part * WIDE], barrier, target)


@gluon.jit
def _backward(
    features,
    N,
    GROUP: gl.constexpr,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    ROW: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """A group's blocks: of queries every other one, of keys the others, so that nobody has the odd one twice."""
    boxes, tiles, loaded, handed, out, logs, gradients = features
    head = gl.program_id(0) % HEADS
    sequence = gl.program_id(0) // HEADS
    if GROUP == 0:
        _load_all((boxes[0], boxes[1]), (tiles[0], tiles[1]), loaded[0], sequence, head * DIM, BLOCKS)
        _load_all((boxes[2], boxes[3]), (tiles[2], tiles[3]), loaded[1], sequence, head * DIM, BLOCKS)
    before = gl.cast(sequence * N, gl.int64)
    first = before * ROW + head * DIM
    dq, dk, dv = gradients
    out += before * (HEADS * DIM) + head * DIM
    logs += gl.program_id(0) * N
    WIDE: gl.constexpr = tiles[0][0].shape[2]
    REST: gl.constexpr = tiles[0][1].shape[2]
    following = _results(out, logs, GROUP, N, WIDE, REST, HEADS * DIM, PAIRS)
    mbarrier.wait(loaded[0], 0)
    mbarrier.wait(loaded[1], 0)
    for block in range(GROUP, BLOCKS, 2):
        results = following
        following = _results(out, logs, block + 2, N, WIDE, REST, HEADS * DIM, PAIRS)
        _of_queries(tiles, handed, results, dq + first, N, block, BLOCKS, TAIL, DIM, ROW, PAIRS)
    for block in range(1 - GROUP, BLOCKS, 2):
        _of_keys(tiles, handed, dk + first, dv + first, N, block, BLOCKS, TAIL, DIM, ROW, PAIRS)


@gluon.jit
def _allocate(boxes, BLOCKS: gl.constexpr):
    """Shared memory for all blocks of one part of a feature."""
    COLUMNS: gl.constexpr = boxes.block_type.shape[2]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, COLUMNS], boxes.dtype)
    return gl.allocate_shared_memory(boxes.dtype, [BLOCKS, SIDE, COLUMNS], layout)


@gluon.jit
def _barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit(do_not_specialize=["N"])
def _attention(
    k,
    k_rest,
    v,
    v_rest,
    q,
    out,
    logs,
    N,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    ROW: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """The result of one head, and log2 Σ_j exp2(S)."""
    boxes = ((k, k_rest), (v, v_rest))
    tiles = (
        (_allocate(k, BLOCKS), _allocate(k_rest, BLOCKS)),
        (_allocate(v, BLOCKS), _allocate(v_rest, BLOCKS)),
    )
    loaded = _barrier()
    gl.warp_specialize(
        [
            (_forward, (boxes, tiles, loaded, q, out, logs, N, 0, BLOCKS, TAIL, HEADS, DIM, ROW, PAIRS)),
            (_forward, (boxes, tiles, loaded, q, out, logs, N, 1, BLOCKS, TAIL, HEADS, DIM, ROW, PAIRS)),
        ],
        [4],
        [_FORWARD],
    )


@gluon.jit(do_not_specialize=["N"])
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
    logs,
    dq,
    dk,
    dv,
    N,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    ROW: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """The gradients of a head's q, k and v."""
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
    loaded, handed, gradients = (_barrier(), _barrier()), (all_logs, all_means, done), (dq, dk, dv)
    features = boxes, tiles, loaded, handed, out, logs, gradients
    gl.warp_specialize(
        [
            (_backward, (features, N, 0, BLOCKS, TAIL, HEADS, DIM, ROW, PAIRS)),
            (_backward, (features, N, 1, BLOCKS, TAIL, HEADS, DIM, ROW, PAIRS)),
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


def _sizes(q: torch.Tensor, pairs: bool) -> dict[str, int]:
    _, length, heads, dim = q.shape
    blocks = -(-length // 64)
    tail = length - 64 * (blocks - 1)
    return {
        "BLOCKS": blocks,
        "TAIL": max(16, 1 << (tail - 1).bit_length()),
        "HEADS": heads,
        "DIM": dim,
        "ROW": q.stride(1),
        "PAIRS": pairs,
        "num_warps": 4,
    }


def _boxes_of(*features: torch.Tensor) -> list[object]:
    """Both parts of features [B, N, H, D] in blocks of 64 tokens of one sequence."""
    parts = PARTS[features[0].shape[3]]
    return [in_boxes(x.flatten(2), (1, 64, part)) for x in features for part in parts]


def _features(qkv: torch.Tensor, pairs: bool) -> tuple[torch.Tensor, ...]:
    """q, k and v [B, N, H, D] of a contiguous tensor: [3, B, N, H, D] in pairs, else [B, N, 3, H, D]."""
    return qkv.unbind(0 if pairs else 2)


def attention_forward(qkv: torch.Tensor, *, pairs: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention [B, N, H, D] of `_features`, and what gradients need."""
    q, k, v = _features(qkv, pairs)
    number, length, heads, _ = q.shape
    out = q.new_empty(q.shape)
    logs = torch.empty((number, heads, length), dtype=torch.float32, device=q.device)
    if number * length:
        with torch.cuda.device_of(q):
            _attention[(number * heads,)](
                *_boxes_of(k, v), q, out, logs, length, **_sizes(q, pairs), maxnreg=_FORWARD.value
            )
    return out, logs


def attention_backward(
    dout: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, logs: torch.Tensor, *, pairs: bool
) -> torch.Tensor:
    """The gradient of qkv."""
    q, k, v = _features(qkv, pairs)
    number, length, heads, _ = q.shape
    gradient = torch.empty_like(qkv)
    if number * length:
        with torch.cuda.device_of(q):
            _attention_gradient[(number * heads,)](
                *_boxes_of(q, k, v, dout),
                out,
                logs,
                *_features(gradient, pairs),
                length,
                **_sizes(q, pairs),
                maxnreg=_BACKWARD.value,
            )
    return gradient
