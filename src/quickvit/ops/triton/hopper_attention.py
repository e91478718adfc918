"""Attention on NVIDIA's Hopper, where keys and values of one head after the other flow past groups of warps.

    o_i = Σ_j P_ij v_j,    P = softmax(S),    S = q kᵀ / √D

A program takes a range of heads. One warp loads blocks of 64 tokens of k and v, in turns, into a ring that has room
for all of a head and for some of the next; another one loads queries. Groups of four warps take blocks of queries in
turns, and give a block of k or v free with the last queries of theirs. The last block of keys is cut to TAIL.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

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
    in_parts,
    in_registers,
    load,
    nothing,
    put,
    times,
    tokens_of,
    without,
)
from quickvit.ops.triton.launch import multiprocessors, shared_memory
from quickvit.ops.triton.streamed import share

# By head size: groups of warps that compute; with larger heads there are registers for two.
GROUPS: dict[int, int] = {80: 3, 104: 2, 112: 2}
# By that number: registers of a thread on average, and of one that computes.
_REGISTERS = {2: (168, 240), 3: (128, 152)}
# Registers of a thread that loads.
_FEW = gl.constexpr(32)


@gluon.jit
def _weigh(score, largest, total, SCALE: gl.constexpr):
    """Weights of a block of keys, the largest score and Σ weights with them, and what former weights are times."""
    line: gl.constexpr = gl.SliceLayout(1, accumulators(SIDE))
    larger = gl.maximum(largest, gl.convert_layout(gl.max(score, axis=1), line) * SCALE)
    shrink = gl.exp2(largest - larger)
    weight = gl.exp2(gl.fma(score, SCALE, -along_rows(larger, score)))
    total = total * shrink + gl.convert_layout(gl.sum(weight, axis=1), line)
    return weight, larger, total, shrink


@gluon.jit
def _filled(ring, number):
    """Where in the ring a block is, once it is there."""
    full = ring[1]
    PLACES: gl.constexpr = full.shape[0]
    place = number % PLACES
    mbarrier.wait(full.index(place), number // PLACES & 1)
    return place


@gluon.jit
def _free(ring, place, leaves):
    """A group needs a block no longer, if it leaves."""
    mbarrier.arrive(ring[2].index(place), count=1, pred=leaves)


@gluon.jit
def _begin(rows, ring, number, COLUMNS: gl.constexpr):
    """The product of queries with a block of keys begins; where that is."""
    place = _filled(ring, number)
    return begin_scores(for_columns(rows, COLUMNS), ring[0], place, COLUMNS), place


@gluon.jit
def _add(weight, ring, number, sums):
    """The product of weights with a block of values begins to be added; where that is."""
    place = _filled(ring, number)
    return begin_sums(weight, ring[0], place, sums), place


@gluon.jit
def _step(rows, ring, number, state, leaves, chunk, N, COLUMNS: gl.constexpr, SCALE: gl.constexpr):
    """The weights of a block of keys, and Σ weights · v of all blocks before; N says where keys end, if they may."""
    weight, largest, total, sums = state
    score, keys = _begin(rows, ring, number, COLUMNS)
    sums, values = _add(weight, ring, number - 1, sums)
    score = warpgroup_mma_wait(len(sums), deps=(score,))
    _free(ring, keys, leaves)
    if N is not None:
        score = without(score, chunk, N)
    weight, largest, total, shrink = _weigh(score, largest, total, SCALE)
    sums = warpgroup_mma_wait(0, deps=sums)
    _free(ring, values, leaves)
    return weight.to(ring[0][0].dtype), largest, total, times(sums, shrink)


@gluon.jit
def _compute(
    features,
    items,
    N,
    GROUP: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    PAIRS: gl.constexpr,
):
    """Every GROUPS-th block of queries."""
    queries, ring, out, logs = features
    SCALE: gl.constexpr = LOG2E / DIM**0.5
    line: gl.constexpr = gl.SliceLayout(1, accumulators(SIDE))
    first, last = share(items)
    turn = 0
    for item in range(first, last):
        before = (item - first) * BLOCKS
        number = 2 * before
        begin = (GROUP + GROUPS - before % GROUPS) % GROUPS
        for block in range(begin, BLOCKS, GROUPS):
            # With its last queries a group gives free what they are multiplied with.
            leaves = block + GROUPS >= BLOCKS
            mbarrier.wait(queries[1].index(GROUP), turn & 1)
            turn += 1
            rows = in_registers(queries[0], GROUP)
            score, keys = _begin(rows, ring, number, SIDE if BLOCKS > 1 else TAIL)
            score = warpgroup_mma_wait(0, deps=(score,))
            _free(ring, keys, leaves)
            # Not before a product had them: a load may still be on its way when others already know of it.
            mbarrier.arrive(queries[2].index(GROUP), count=1)
            if BLOCKS == 1:
                score = without(score, 0, N)
            largest = gl.full((SIDE,), -float("inf"), gl.float32, layout=line)
            total = gl.zeros((SIDE,), gl.float32, layout=line)
            weight, largest, total, _ = _weigh(score, largest, total, SCALE)
            sums = ()
            for part in gl.static_range(len(rows)):
                sums += (nothing(rows[part].shape[1]),)
            state = weight.to(ring[0][0].dtype), largest, total, sums
            for chunk in range(1, BLOCKS - 1):
                state = _step(rows, ring, number + 2 * chunk, state, leaves, chunk, None, SIDE, SCALE)
            end = number + 2 * BLOCKS
            if BLOCKS > 1:
                state = _step(rows, ring, end - 2, state, leaves, BLOCKS - 1, N, TAIL, SCALE)
            weights, largest, total, sums = state
            sums, values = _add(weights, ring, end - 1, sums)
            sums = warpgroup_mma_wait(0, deps=sums)
            _free(ring, values, leaves)
            token = tokens_of(block, SIDE)
            gl.store(logs + item * N + token, largest + gl.log2(total), mask=token < N)
            start = gl.cast(item // HEADS * N, gl.int64) * (HEADS * DIM) + item % HEADS * DIM
            put(out + start, times(sums, 1 / total), block, N, DIM, HEADS * DIM, PAIRS)
        if begin >= BLOCKS:
            # Nothing to do: but a barrier knows of two phases only, so nobody may be far ahead.
            for offset in range(2 * BLOCKS):
                _free(ring, _filled(ring, number + offset), True)


@gluon.jit
def _fill(boxes, ring, number, item, block, HEADS: gl.constexpr):
    """A block begins to be loaded to the next place of a ring, once that is free."""
    parts, full, empty = ring
    PLACES: gl.constexpr = full.shape[0]
    place = number % PLACES
    mbarrier.wait(empty.index(place), (number // PLACES & 1) ^ 1)
    mbarrier.expect(full.index(place), columns_of(parts, len(parts)) * SIDE * 2)
    load(boxes, parts, place, full.index(place), item, block, HEADS)


@gluon.jit
def _load_keys(keys, values, ring, items, BLOCKS: gl.constexpr, HEADS: gl.constexpr):
    """Blocks of keys and values, in turns, of one head after the other."""
    first, last = share(items)
    number = 0
    for item in range(first, last):
        for block in range(BLOCKS):
            _fill(keys, ring, number, item, block, HEADS)
            _fill(values, ring, number + 1, item, block, HEADS)
            number += 2


@gluon.jit
def _load_queries(boxes, queries, items, BLOCKS: gl.constexpr, HEADS: gl.constexpr):
    """One block of queries after the other, for one group after the other."""
    first, last = share(items)
    number = 0
    for item in range(first, last):
        for block in range(BLOCKS):
            _fill(boxes, queries, number, item, block, HEADS)
            number += 1


@gluon.jit
def _new(boxes, PLACES: gl.constexpr, READERS: gl.constexpr):
    """Shared memory for so many blocks of tokens, each of which so many groups of warps read, and its barriers."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    parts = ()
    for part in gl.static_range(len(boxes)):
        parts += (allocate(boxes[part], PLACES),)
    full = gl.allocate_shared_memory(gl.int64, [PLACES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [PLACES, 1], barrier)
    for place in gl.static_range(PLACES):
        mbarrier.init(full.index(place), count=1)
        mbarrier.init(empty.index(place), count=READERS)
    return parts, full, empty


@gluon.jit
def _given(one, two, three):
    """The parts that there are."""
    if three is None:
        return one, two
    else:
        return one, two, three


@gluon.jit(do_not_specialize=["items", "N"])
def _attention(
    q_one,
    q_two,
    q_three,
    k_one,
    k_two,
    k_three,
    v_one,
    v_two,
    v_three,
    out,
    logs,
    items,
    N,
    PLACES: gl.constexpr,
    GROUPS: gl.constexpr,
    BLOCKS: gl.constexpr,
    TAIL: gl.constexpr,
    HEADS: gl.constexpr,
    DIM: gl.constexpr,
    PAIRS: gl.constexpr,
    REGISTERS: gl.constexpr,
):
    """The results of so many heads, and log2 Σ_j exp2(S)."""
    q, k, v = _given(q_one, q_two, q_three), _given(k_one, k_two, k_three), _given(v_one, v_two, v_three)
    queries = _new(q, GROUPS, 1)
    ring = _new(k, PLACES, GROUPS)
    features = queries, ring, out, logs
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (features, items, N, 0, GROUPS, BLOCKS, TAIL, HEADS, DIM, PAIRS)),
                (_compute, (features, items, N, 1, GROUPS, BLOCKS, TAIL, HEADS, DIM, PAIRS)),
                (_load_keys, (k, v, ring, items, BLOCKS, HEADS)),
                (_load_queries, (q, queries, items, BLOCKS, HEADS)),
            ],
            [4, 1, 1],
            [REGISTERS, _FEW, _FEW],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (features, items, N, 0, GROUPS, BLOCKS, TAIL, HEADS, DIM, PAIRS)),
                (_compute, (features, items, N, 1, GROUPS, BLOCKS, TAIL, HEADS, DIM, PAIRS)),
                (_compute, (features, items, N, 2, GROUPS, BLOCKS, TAIL, HEADS, DIM, PAIRS)),
                (_load_keys, (k, v, ring, items, BLOCKS, HEADS)),
                (_load_queries, (q, queries, items, BLOCKS, HEADS)),
            ],
            [4, 4, 1, 1],
            [REGISTERS, REGISTERS, _FEW, _FEW],
        )


@cache
def _places(device: torch.device, dim: int) -> int:
    """How many blocks of keys or values there is room for beside the queries."""
    return (shared_memory(device) - 1024) // (64 * 2 * sum(PARTS[dim])) - GROUPS[dim]


@cache
def most_tokens(device: torch.device, dtype: torch.dtype, dim: int) -> int:
    """Sequences of how many tokens there is room for with heads of this size, 0 without kernels for them."""
    if dim not in PARTS or dtype.itemsize != 2:
        return 0
    return _places(device, dim) // 2 * 64


def attention_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, pairs: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of q, k, v [B, N, H, D], which have their entries in `pairs` or in order, and what gradients need."""
    number, length, heads, dim = q.shape
    out = q.new_empty(q.shape)
    logs = q.new_empty((number, heads, length), dtype=torch.float32)
    items, groups = number * heads, GROUPS[dim]
    if items * length:
        average, many = _REGISTERS[groups]
        boxes = [in_parts(feature) for feature in (q, k, v)]
        with torch.cuda.device_of(q):
            _attention[(min(items, multiprocessors(q.device)),)](
                *(box for parts in boxes for box in [*parts, None][:3]),
                out,
                logs,
                items,
                length,
                PLACES=_places(q.device, dim),
                GROUPS=groups,
                **block_sizes(length),
                HEADS=heads,
                DIM=dim,
                PAIRS=pairs,
                REGISTERS=many,
                num_warps=4,
                maxnreg=average,
            )
    return out, logs
