"""The octic linear map to 1024 or 1280 channels from several times as many, on NVIDIA's Hopper.

    y_ρ = W_ρ x_ρ  for A1 A2 B1 B2          and          y_j = W_E x_j  for both components of E

A tile is 128 tokens by all columns of one irrep, or of one component of E, which is four times the work. As two
batched products they end at different times and leave multiprocessors idle twice. Here one launch has both: a
program takes its tiles of E, then as many others as it takes for all to end together.

One warp loads, 64 channels of a tile and of the weights at a time, a turn. Two groups of four warps multiply and
store, 64 tokens each. Buffers are handed over by barriers: `full` says that one was loaded, `empty` that it may be
loaded again. Numbers of columns that are no power of two are cut in two PARTS, 160 in 128 + 32.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)

from quickvit.ops.triton.boxes import (
    beside,
    in_boxes,
    load_box,
    nothing,
    parts_of,
    share,
    shares,
    store_box,
    view_as,
    wait_for,
)
from quickvit.ops.triton.launch import multiprocessors, shared_memory

# By the width: the columns of a box, which is 64 tokens or channels, and how many turns there is room for.
BOXES: dict[int, tuple[int, int]] = {1024: (64, 4), 1280: (32, 3)}
SIDE = gl.constexpr(64)
# Registers of a thread that loads, and of one that computes.
_FEW, _MANY = gl.constexpr(40), gl.constexpr(232)


@gluon.jit
def _load_turn(
    x,
    matrix,
    rings,
    turn,
    row,
    column,
    irrep,
    inner,
    COPIES: gl.constexpr,
    F: gl.constexpr,
    STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """64 channels of 128 tokens, and the weights that they meet."""
    tokens, weights, full, empty = rings
    stage = turn % STAGES
    ready = full.index(stage)
    mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
    mbarrier.expect(ready, (2 * SIDE + COPIES * F) * SIDE * 2)
    for half in gl.static_range(2):
        load_box(x, [row + half * SIDE, column + inner], ready, tokens.index(2 * stage + half))
    parts: gl.constexpr = parts_of(F, COPIES)
    box: gl.constexpr = matrix.block_type.shape[2 if TRANSPOSED else 1]
    for part in gl.static_range(len(parts)):
        for number in gl.static_range(parts[part] // box):
            buffer = weights[part].index(stage * (weights[part].shape[0] // STAGES) + number)
            buffer = view_as(buffer, buffer.dtype, matrix.block_type.shape, matrix.layout)
            place = part * parts[0] + number * box
            if TRANSPOSED:
                load_box(matrix, [irrep, inner, place], ready, buffer)
            else:
                load_box(matrix, [irrep, place, inner], ready, buffer)


@gluon.jit
def _load_tiles(
    x,
    one,
    two,
    rings,
    work,
    K: gl.constexpr,
    F: gl.constexpr,
    STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """One tile after the other."""
    turn = 0
    for tile in range(gl.program_id(0), 2 * work[0], gl.num_programs(0)):
        row = tile // 2 * (2 * SIDE)
        column = (4 + tile % 2 * 2) * K
        for inner in range(0, 2 * K, SIDE):
            _load_turn(x, two, rings, turn, row, column, 0, inner, 2, F, STAGES, TRANSPOSED)
            turn += 1
    first, last = share(4 * work[0], work[1], work[2], work[3])
    for tile in range(first, last):
        row = tile // 4 * (2 * SIDE)
        irrep = tile % 4
        for inner in range(0, K, SIDE):
            _load_turn(x, one, rings, turn, row, irrep * K, irrep, inner, 1, F, STAGES, TRANSPOSED)
            turn += 1


@gluon.jit
def _weights_of(memory, stage, COLUMNS: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr):
    """The weights of a turn as the right operand of a product."""
    shape: gl.constexpr = beside(memory.shape, COLUMNS, TRANSPOSED)
    weight = view_as(memory, memory.dtype, shape, memory.layout).index(stage * (shape[0] // STAGES))
    if not TRANSPOSED:
        weight = weight.permute((1, 0))
    return weight


@gluon.jit
def _begin(
    token, weights, stage, totals, more, PARTS: gl.constexpr, STAGES: gl.constexpr, TRANSPOSED: gl.constexpr
):
    """The products of a turn begin; `more`: they are added to the totals."""
    result = ()
    for part in gl.static_range(len(PARTS)):
        weight = _weights_of(weights[part], stage, PARTS[part], STAGES, TRANSPOSED)
        result += (warpgroup_mma(token, weight, totals[part], use_acc=more, is_async=True),)
    return result


@gluon.jit
def _product(
    rings,
    turn,
    TURNS: gl.constexpr,
    GROUP: gl.constexpr,
    PARTS: gl.constexpr,
    STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """The product of a group's tokens in parts, which takes so many turns."""
    tokens, weights, full, empty = rings
    totals = ()
    for part in gl.static_range(len(PARTS)):
        totals += (nothing(PARTS[part]),)
    for step in range(TURNS):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        token = tokens.index(2 * stage + GROUP)
        totals = _begin(token, weights, stage, totals, step > 0, PARTS, STAGES, TRANSPOSED)
        # Those of the turn before have ended.
        totals = wait_for(len(PARTS), totals)
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
        turn += 1
    totals = wait_for(0, totals)
    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
    return totals


@gluon.jit
def _put(y, slots, row, column, totals):
    """The product of a group's tokens leaves."""
    tma.store_wait(0)
    for part in gl.static_range(len(totals)):
        _put_columns(y, slots, row, column, part * totals[0].shape[1], totals[part])


@gluon.jit
def _put_columns(y, slots, row, column, PLACE: gl.constexpr, value):
    """Columns leave, as many at a time as a box has, by way of two slots in turns."""
    COLUMNS: gl.constexpr = value.shape[1]
    BOX: gl.constexpr = y.block_type.shape[1]
    if COLUMNS > BOX:
        left, right = gl.split(value.reshape([SIDE, 2, COLUMNS // 2]).permute([0, 2, 1]))
        _put_columns(y, slots, row, column, PLACE, left)
        _put_columns(y, slots, row, column, PLACE + COLUMNS // 2, right)
    else:
        tma.store_wait(1)
        slot = slots.index(PLACE // BOX % 2)
        slot.store(value.to(y.dtype))
        fence_async_shared()
        store_box(y, [row, column + PLACE], slot)


@gluon.jit
def _compute(
    y,
    rings,
    slots,
    work,
    GROUP: gl.constexpr,
    K: gl.constexpr,
    F: gl.constexpr,
    STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """A group's tokens of one tile after the other."""
    ONE: gl.constexpr = parts_of(F, 1)
    TWO: gl.constexpr = parts_of(F, 2)
    # Channels past the end of an irrep meet weights of zero.
    ONE_TURNS: gl.constexpr = (K + SIDE - 1) // SIDE
    TWO_TURNS: gl.constexpr = (2 * K + SIDE - 1) // SIDE
    turn = 0
    for tile in range(gl.program_id(0), 2 * work[0], gl.num_programs(0)):
        totals = _product(rings, turn, TWO_TURNS, GROUP, TWO, STAGES, TRANSPOSED)
        turn += TWO_TURNS
        _put(y, slots, (tile // 2 * 2 + GROUP) * SIDE, (4 + tile % 2 * 2) * F, totals)
    first, last = share(4 * work[0], work[1], work[2], work[3])
    for tile in range(first, last):
        totals = _product(rings, turn, ONE_TURNS, GROUP, ONE, STAGES, TRANSPOSED)
        turn += ONE_TURNS
        _put(y, slots, (tile // 4 * 2 + GROUP) * SIDE, tile % 4 * F, totals)
    tma.store_wait(0)


@gluon.jit
def _allocate(boxes, COLUMNS: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for the weights of so many columns, of all turns that there is room for."""
    box: gl.constexpr = boxes.block_type.shape
    number: gl.constexpr = STAGES * COLUMNS * SIDE // (box[1] * box[2])
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([box[1], box[2]], boxes.dtype)
    return gl.allocate_shared_memory(boxes.dtype, [number, box[1], box[2]], layout)


@gluon.jit(do_not_specialize=["blocks", "longer", "less", "more"])
def _long_linear(
    x,
    one,
    two,
    y,
    blocks,
    longer,
    less,
    more,
    K: gl.constexpr,
    F: gl.constexpr,
    STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """y of x, which has so many blocks of 128 tokens; K and F are eighths of the widths of x and y.

    The `longer` first programs have a tile of E more than the others. Of other tiles they have `less`, those `more`.
    """
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    parts: gl.constexpr = parts_of(F, 2)
    tokens = gl.allocate_shared_memory(x.dtype, [2 * STAGES, SIDE, SIDE], x.layout)
    weights = ()
    for part in gl.static_range(len(parts)):
        weights += (_allocate(one, parts[part], STAGES),)
    slots_0 = gl.allocate_shared_memory(x.dtype, [2, SIDE, y.block_type.shape[1]], y.layout)
    slots_1 = gl.allocate_shared_memory(x.dtype, [2, SIDE, y.block_type.shape[1]], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    rings, work = (tokens, weights, full, empty), (blocks, longer, less, more)
    gl.warp_specialize(
        [
            (_compute, (y, rings, slots_0, work, 0, K, F, STAGES, TRANSPOSED)),
            (_compute, (y, rings, slots_1, work, 1, K, F, STAGES, TRANSPOSED)),
            (_load_tiles, (x, one, two, rings, work, K, F, STAGES, TRANSPOSED)),
        ],
        [4, 1],
        [_MANY, _FEW],
    )


@cache
def takes(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    """Whether the kernel is for a map from C channels to a width: in 16 bits, to 1024 or 1280 from twice as many."""
    if width not in BOXES or channels < 2 * width or dtype.itemsize != 2:
        return False
    box, stages = BOXES[width]
    needed = 2 * 64 * (stages * (128 + width // 4) + 4 * box) + 1024
    return shared_memory(device) >= needed


def linear(x: torch.Tensor, one: torch.Tensor, two: torch.Tensor, out: torch.Tensor) -> None:
    """W x of x[T, C] written to out[T, 8F]; one[4, F, C/8], two[1, 2F, C/4]."""
    if not len(x):
        return
    width = out.shape[1]
    columns, stages = BOXES[width]
    blocks = -(-len(x) // 128)
    programs = min(multiprocessors(x.device), 4 * blocks)
    transposed = one.stride(2) != 1
    if transposed:
        one, two = one.mT, two.mT
    box = (1, 64, columns) if transposed else (1, columns, 64)
    with torch.cuda.device_of(x):
        _long_linear[(programs,)](
            in_boxes(x, (64, 64)),
            in_boxes(one, box),
            in_boxes(two, box),
            in_boxes(out, (64, columns)),
            blocks,
            *shares(2 * blocks, 4 * blocks, 4, programs),
            K=x.shape[1] // 8,
            F=width // 8,
            STAGES=stages,
            TRANSPOSED=transposed,
            num_warps=4,
            # What is left of a multiprocessor's registers for 12 warps.
            maxnreg=168,
        )
