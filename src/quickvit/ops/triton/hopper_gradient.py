"""The gradient of attention on NVIDIA's Hopper, a whole head at a time, for heads of 80.

    S = q kᵀ / √D,    P = softmax(S),    o = P v

    dP = do vᵀ,    dS = P (dP - Σ_d o do),    dv = Pᵀ do,    dq = dS k / √D,    dk = dSᵀ q / √D

A program takes one head of one sequence and keeps q, k, v and do in shared memory, in blocks of 64 tokens. Two groups
of four warps take blocks in turns, first blocks of queries (dq), then blocks of keys (dk and dv). So S and dP are
computed twice, but no sum crosses groups. What does are two numbers for each query, handed over block by block. The
last block of tokens is cut to TAIL where it is a right operand.

From a token of q, k, v, or of their gradients, to the next are ROW entries.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_init, warpgroup_mma_wait

from quickvit.ops.triton.boxes import accumulators
from quickvit.ops.triton.hopper_vectors import (
    LOG2E,
    PARTS,
    SIDE,
    allocate,
    along_rows,
    begin_scores,
    begin_sums,
    block_sizes,
    columns_of,
    for_columns,
    get_part,
    in_parts,
    in_registers,
    load,
    nothing,
    put,
    tokens_of,
    without,
)
from quickvit.ops.triton.launch import shared_memory

# Registers of a thread.
_REGISTERS = gl.constexpr(240)


@gluon.jit
def _no_sums(memory):
    """Sums to begin with."""
    wide, rest = nothing(memory[0].shape[2]), nothing(memory[1].shape[2])
    return warpgroup_mma_init(wide), warpgroup_mma_init(rest)


@gluon.jit
def _in_memory(memory, block):
    """A block of tokens as a left operand in shared memory."""
    return memory[0].index(block), memory[1].index(block)


@gluon.jit
def _along_columns(memory, block, values):
    """A number for each of a block's tokens, which are the columns of a tile of values."""
    layout: gl.constexpr = gl.SliceLayout(0, accumulators(values.shape[1]))
    return memory.index(block).slice(0, values.shape[1]).load(layout)[None, :]


@gluon.jit
def _results(
    out, logs, block, N, WIDE: gl.constexpr, REST: gl.constexpr, ROW: gl.constexpr, PAIRS: gl.constexpr
):
    """Both parts of the results of a block of queries, and their logarithms."""
    token = tokens_of(block, SIDE)
    return (
        get_part(out, block, N, WIDE, ROW, PAIRS),
        get_part(out + WIDE, block, N, REST, ROW, PAIRS),
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
    score = begin_scores(for_columns(rows[0], COLUMNS), k, chunk, COLUMNS)
    slope = begin_scores(for_columns(rows[1], COLUMNS), v, chunk, COLUMNS)
    score = warpgroup_mma_wait(2, deps=(score,))
    if N is not None:
        score = without(score, chunk, N)
    weight = gl.exp2(gl.fma(score, SCALE, -along_rows(log, score)))
    slope = warpgroup_mma_wait(0, deps=(slope,))
    return begin_sums(weight * (slope - along_rows(mean, slope)), k, chunk, dq)


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
    SCALE: gl.constexpr = LOG2E / DIM**0.5
    FACTOR: gl.constexpr = 1 / DIM**0.5
    wide, rest, log = results
    mean = _dots(wide, do[0], block) + _dots(rest, do[1], block)
    all_logs.index(block).store(log)
    all_means.index(block).store(mean)
    mbarrier.arrive(done.index(block), count=1)
    dq = _no_sums(k)
    rows = in_registers(q, block), in_registers(do, block)
    for chunk in range(BLOCKS - 1):
        dq = _add_to_dq(dq, rows, k, v, log, mean, chunk, None, SIDE, SCALE)
    dq = _add_to_dq(dq, rows, k, v, log, mean, BLOCKS - 1, N, TAIL, SCALE)
    wide, rest = warpgroup_mma_wait(0, deps=dq)
    put(dq_out, (wide * FACTOR, rest * FACTOR), block, N, DIM, ROW, PAIRS)


@gluon.jit
def _add_to_dk_and_dv(dk, dv, rows, q, do, handed, chunk, COLUMNS: gl.constexpr, SCALE: gl.constexpr):
    """The part that a block of queries has in dk and dv; what is added goes on while the next begins."""
    logs, means, done = handed
    score = begin_scores(rows[0], q, chunk, COLUMNS)
    slope = begin_scores(rows[1], do, chunk, COLUMNS)
    mbarrier.wait(done.index(chunk), 0)
    score = warpgroup_mma_wait(2, deps=(score,))
    weight = gl.exp2(gl.fma(score, SCALE, -_along_columns(logs, chunk, score)))
    dv = begin_sums(weight, do, chunk, dv)
    slope = warpgroup_mma_wait(2, deps=(slope,))
    dk = begin_sums(weight * (slope - _along_columns(means, chunk, slope)), q, chunk, dk)
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
    SCALE: gl.constexpr = LOG2E / DIM**0.5
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
    put(dk_out, (dk * FACTOR, dk_rest * FACTOR), block, N, DIM, ROW, PAIRS)
    put(dv_out, (dv, dv_rest), block, N, DIM, ROW, PAIRS)


@gluon.jit
def _load_all(boxes, tiles, barrier, BLOCKS: gl.constexpr, HEADS: gl.constexpr):
    """All blocks of two features begin to be loaded."""
    mbarrier.expect(barrier, 2 * BLOCKS * SIDE * columns_of(tiles[0], 2) * 2)
    for block in gl.static_range(BLOCKS):
        for feature in gl.static_range(2):
            load(boxes[feature], tiles[feature], block, barrier, gl.program_id(0), block, HEADS)


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
        _load_all((boxes[0], boxes[1]), (tiles[0], tiles[1]), loaded[0], BLOCKS, HEADS)
        _load_all((boxes[2], boxes[3]), (tiles[2], tiles[3]), loaded[1], BLOCKS, HEADS)
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
def _barrier():
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


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
        tiles += ((allocate(boxes[feature][0], BLOCKS), allocate(boxes[feature][1], BLOCKS)),)
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
        [_REGISTERS],
    )


@cache
def most_tokens(device: torch.device, dtype: torch.dtype, dim: int) -> int:
    """Sequences of how many tokens there is room for with heads of this size, 0 without kernels for them."""
    if len(PARTS.get(dim, ())) != 2 or dtype.itemsize != 2:
        return 0
    # Of q, k, v and do two bytes an entry, of each query two numbers.
    return (shared_memory(device) - 1024) // (64 * (4 * 2 * dim + 2 * 4)) * 64


def _features(qkv: torch.Tensor, pairs: bool) -> tuple[torch.Tensor, ...]:
    """q, k and v [B, N, H, D] of one tensor: [3, B, N, H, D] in pairs, else [B, N, 3, H, D]."""
    return qkv.unbind(0 if pairs else 2)


def attention_backward(
    dout: torch.Tensor, qkv: torch.Tensor, out: torch.Tensor, logs: torch.Tensor, *, pairs: bool
) -> torch.Tensor:
    """The gradient of qkv, [3, B, N, H, D] in pairs, else [B, N, 3, H, D]."""
    q, k, v = _features(qkv, pairs)
    number, length, heads, dim = q.shape
    gradient = torch.empty_like(qkv)
    if number * length:
        with torch.cuda.device_of(q):
            _attention_gradient[(number * heads,)](
                *(box for feature in (q, k, v, dout) for box in in_parts(feature)),
                out,
                logs,
                *_features(gradient, pairs),
                length,
                **block_sizes(length),
                HEADS=heads,
                DIM=dim,
                ROW=q.stride(1),
                PAIRS=pairs,
                num_warps=4,
                maxnreg=_REGISTERS.value,
            )
    return gradient
