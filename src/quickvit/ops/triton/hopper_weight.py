"""Partial sums of the weight gradients of the octic linear map on NVIDIA's Hopper, see `weight_gradient.py`.

    Σ_t a_t b_tᵀ    over a slice of the tokens, for A1 A2 B1 B2 and for each component of E

A tile is 128 rows, which are channels of a, by all channels of b that they meet, so that a is read once. Tiles of E
are twice as wide as others and twice the work: a program takes its tiles of E, then as many others as it takes for
all to end together. One warp loads 64 tokens at a time, a turn; two groups of four warps have 64 rows each.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from quickvit.ops.triton.boxes import (
    accumulators,
    beside,
    in_boxes,
    load_box,
    nothing,
    parts_of,
    share,
    shares,
    view_as,
    wait_for,
)
from quickvit.ops.triton.launch import multiprocessors, shared_memory

# By an eighth of the width of b: the columns of a box of it, which is 64 tokens.
BOXES: dict[int, int] = {128: 64, 160: 32}
SIDE = gl.constexpr(64)
STAGES = gl.constexpr(4)
# Registers of a thread that loads, and of one that computes.
_FEW, _MANY = gl.constexpr(40), gl.constexpr(232)


@gluon.jit
def _place(item, work, COPIES: gl.constexpr, A: gl.constexpr):
    """The slice of an item, its first turn and that after its last, its block, and its first row there."""
    _, _, _, _, _, steps, turns = work
    ROWS: gl.constexpr = (COPIES * A + 2 * SIDE - 1) // (2 * SIDE)
    BLOCKS: gl.constexpr = 2 if COPIES == 2 else 4
    part = item // (BLOCKS * ROWS)
    block = item // ROWS % BLOCKS
    return part, part * steps, min((part + 1) * steps, turns), block, item % ROWS * (2 * SIDE)


@gluon.jit
def _load_item(a, b, rings, item, work, turn, COPIES: gl.constexpr, A: gl.constexpr, B: gl.constexpr):
    """The tokens of an item."""
    lefts, rights, full, empty = rings
    _, first, last, block, row = _place(item, work, COPIES, A)
    # Blocks of one-dimensional irreps begin at 0 1 2 3, those of E at 4 and 6 widths.
    start = 4 + 2 * block if COPIES == 2 else block
    parts: gl.constexpr = parts_of(B, COPIES)
    box: gl.constexpr = b.block_type.shape[1]
    for step in range(first, last):
        stage = turn % STAGES
        ready = full.index(stage)
        mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(ready, (2 * SIDE + COPIES * B) * SIDE * 2)
        for half in gl.static_range(2):
            corner = [step * SIDE, start * A + row + half * SIDE]
            load_box(a, corner, ready, lefts.index(2 * stage + half))
        for part in gl.static_range(len(parts)):
            for number in gl.static_range(parts[part] // box):
                corner = [step * SIDE, start * B + part * parts[0] + number * box]
                buffer = rights[part].index(stage * (rights[part].shape[0] // STAGES) + number)
                load_box(b, corner, ready, buffer)
        turn += 1
    return turn


@gluon.jit
def _load_items(a, b, rings, work, A: gl.constexpr, B: gl.constexpr):
    """One item after the other."""
    turn = 0
    for item in range(gl.program_id(0), work[0], gl.num_programs(0)):
        turn = _load_item(a, b, rings, item, work, turn, 2, A, B)
    first, last = share(work[1], work[2], work[3], work[4])
    for item in range(first, last):
        turn = _load_item(a, b, rings, item, work, turn, 1, A, B)


@gluon.jit
def _right(memory, stage, COLUMNS: gl.constexpr):
    """Channels of b as the right operand of a product over 64 tokens."""
    shape: gl.constexpr = beside(memory.shape, COLUMNS, True)
    return view_as(memory, memory.dtype, shape, memory.layout).index(stage * (shape[0] // STAGES))


@gluon.jit
def _begin(left, rights, stage, totals, more, PARTS: gl.constexpr):
    """The products of a turn begin; `more`: they are added to the totals."""
    result = ()
    for part in gl.static_range(len(PARTS)):
        right = _right(rights[part], stage, PARTS[part])
        result += (warpgroup_mma(left, right, totals[part], use_acc=more, is_async=True),)
    return result


@gluon.jit
def _sum_item(
    partial,
    rings,
    item,
    work,
    turn,
    GROUP: gl.constexpr,
    COPIES: gl.constexpr,
    A: gl.constexpr,
    B: gl.constexpr,
):
    """A group's rows of an item."""
    lefts, rights, full, empty = rings
    PARTS: gl.constexpr = parts_of(B, COPIES)
    number, first, last, block, row = _place(item, work, COPIES, A)
    totals = ()
    for part in gl.static_range(len(PARTS)):
        totals += (nothing(PARTS[part]),)
    for step in range(first, last):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        left = lefts.index(2 * stage + GROUP).permute((1, 0))
        totals = _begin(left, rights, stage, totals, step > first, PARTS)
        # Those of the turn before have ended.
        totals = wait_for(len(PARTS), totals)
        mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1, pred=step > first)
        turn += 1
    totals = wait_for(0, totals)
    mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
    partial += gl.cast(number, gl.int64) * (12 * A * B) + (4 + 4 * block if COPIES == 2 else block) * (A * B)
    for part in gl.static_range(len(PARTS)):
        _put(partial + part * PARTS[0], totals[part], row + GROUP * SIDE, COPIES * A, COPIES * B)
    return turn


@gluon.jit
def _put(matrix, value, first, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Store columns of the rows from `first` on of a matrix of so many."""
    layout: gl.constexpr = accumulators(value.shape[1])
    row = first + gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, value.shape[1], layout=gl.SliceLayout(0, layout))
    gl.store(matrix + row[:, None] * COLUMNS + column[None, :], value, mask=(row < ROWS)[:, None])


@gluon.jit
def _compute(partial, rings, work, GROUP: gl.constexpr, A: gl.constexpr, B: gl.constexpr):
    """A group's rows of one item after the other."""
    turn = 0
    for item in range(gl.program_id(0), work[0], gl.num_programs(0)):
        turn = _sum_item(partial, rings, item, work, turn, GROUP, 2, A, B)
    first, last = share(work[1], work[2], work[3], work[4])
    for item in range(first, last):
        turn = _sum_item(partial, rings, item, work, turn, GROUP, 1, A, B)


@gluon.jit
def _allocate(boxes, COLUMNS: gl.constexpr):
    """Shared memory for so many channels, of all turns that there is room for."""
    box: gl.constexpr = boxes.block_type.shape
    return gl.allocate_shared_memory(boxes.dtype, [STAGES * COLUMNS // box[1], SIDE, box[1]], boxes.layout)


@gluon.jit(do_not_specialize=["twos", "ones", "longer", "less", "more", "steps", "turns"])
def _hopper_partial_sums(
    a, b, partial, twos, ones, longer, less, more, steps, turns, A: gl.constexpr, B: gl.constexpr
):
    """partial[slices, 12 A B] of a and b, whose tokens are so many turns and a slice's so many steps of them.

    The `longer` first programs have an item of E more than the others. Of the others they have `less`, those `more`.
    """
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    parts: gl.constexpr = parts_of(B, 2)
    lefts = _allocate(a, 2 * SIDE)
    rights = ()
    for part in gl.static_range(len(parts)):
        rights += (_allocate(b, parts[part]),)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    rings, work = (lefts, rights, full, empty), (twos, ones, longer, less, more, steps, turns)
    gl.warp_specialize(
        [
            (_compute, (partial, rings, work, 0, A, B)),
            (_compute, (partial, rings, work, 1, A, B)),
            (_load_items, (a, b, rings, work, A, B)),
        ],
        [4, 1],
        [_MANY, _FEW],
    )


@cache
def takes(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    """Whether there is a kernel for a map from C channels to a width: in 16 bits, if one of them is 1024 or 1280."""
    narrower = min(channels, width) // 8
    if narrower not in BOXES or dtype.itemsize != 2:
        return False
    return shared_memory(device) >= 2 * 64 * 4 * (128 + 2 * narrower) + 1024


@cache
def _cut(turns: int, rows: int, columns: int, programs: int) -> tuple[int, int, int]:
    """How many turns of tokens a slice should have, and how many items of E and others there are then."""
    twos, ones = 2 * -(-2 * rows // 128), 4 * -(-rows // 128)

    def time(slices: int) -> float:
        longer, less, more = shares(slices * twos, slices * ones, 2, programs)
        most = max(
            2 * (slices * twos // programs + (longer > 0)) + less, 2 * (slices * twos // programs) + more
        )
        # The last term is for the sum over slices, which is bound by memory.
        return most * -(-turns // slices) + 6e-5 * rows * columns * slices

    slices = min(range(1, min(turns, 16) + 1), key=time)
    steps = -(-turns // slices)
    slices = -(-turns // steps)
    return steps, slices * twos, slices * ones


def partial_sums(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Σ_t a_t b_tᵀ over slices of the tokens of a[T, 8A] and b[T, 8B], B ≤ A: [slices, 12 A B] in float32."""
    rows, columns = a.shape[1] // 8, b.shape[1] // 8
    turns = -(-len(a) // 64)
    programs = multiprocessors(a.device)
    steps, twos, ones = _cut(turns, rows, columns, programs)
    partial = torch.empty((-(-turns // steps), 12 * rows * columns), dtype=torch.float32, device=a.device)
    with torch.cuda.device_of(a):
        _hopper_partial_sums[(programs,)](
            in_boxes(a, (64, 64)),
            in_boxes(b, (64, BOXES[columns])),
            partial,
            twos,
            ones,
            *shares(twos, ones, 2, programs),
            steps,
            turns,
            A=rows,
            B=columns,
            num_warps=4,
            # What is left of a multiprocessor's registers for 12 warps.
            maxnreg=168,
        )
    return partial
