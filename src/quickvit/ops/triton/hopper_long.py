"""The octic linear map to 1024 channels from several times as many, on NVIDIA's Hopper.

    y_ρ = W_ρ x_ρ  for A1 A2 B1 B2          and          y_j = W_E x_j  for both components of E

A tile is 128 tokens by all columns of one irrep, or of one component of E, which is four times the work. As two
batched products they end at different times and leave multiprocessors idle twice. Here one launch has both: a
program takes its tiles of E, then as many others as it takes for all to end together.

One warp loads, 64 channels of a tile and of the weights at a time, a turn. Two groups of four warps multiply and
store, 64 tokens each. Buffers are handed over by barriers: `full` says that one was loaded, `empty` that it may be
loaded again.
"""

from functools import cache, lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from quickvit.ops.triton.boxes import accumulators, in_boxes, load_box, store_box, view_as
from quickvit.ops.triton.launch import multiprocessors, shared_memory

WIDTH = 1024
# Side of a box, and columns of an irrep.
SIDE = gl.constexpr(64)
F = gl.constexpr(WIDTH // 8)
STAGES = gl.constexpr(4)
# Boxes of weights in a turn: of E, and of another irrep.
_WIDE, _NARROW = gl.constexpr(2 * WIDTH // 8 // 64), gl.constexpr(WIDTH // 8 // 64)
# Registers of a thread that loads, and of one that computes.
_FEW, _MANY = gl.constexpr(40), gl.constexpr(232)


@gluon.jit
def _share(work):
    """The first of this program's tiles of one-dimensional irreps, and the first that is no longer one."""
    blocks, longer, less, more = work
    program = gl.program_id(0)
    first = min(program, longer) * less + max(program - longer, 0) * more
    last = first + (less if program < longer else more)
    return min(first, 4 * blocks), min(last, 4 * blocks)


@gluon.jit
def _load_turn(
    x, matrix, rings, turn, row, column, weight_row, inner, BOXES: gl.constexpr, TRANSPOSED: gl.constexpr
):
    """64 channels of 128 tokens, and the weights that they meet."""
    tokens, weights, full, empty = rings
    stage = turn % STAGES
    ready = full.index(stage)
    mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
    mbarrier.expect(ready, (2 + BOXES) * SIDE * SIDE * 2)
    for half in gl.static_range(2):
        load_box(x, [row + half * SIDE, column + inner], ready, tokens.index(2 * stage + half))
    for box in gl.static_range(BOXES):
        buffer = weights.index(_WIDE * stage + box)
        if TRANSPOSED:
            load_box(matrix, [weight_row + inner, box * SIDE], ready, buffer)
        else:
            load_box(matrix, [weight_row + box * SIDE, inner], ready, buffer)


@gluon.jit
def _load_tiles(x, one, two, rings, work, K: gl.constexpr, TRANSPOSED: gl.constexpr):
    """One tile after the other."""
    turn = 0
    for tile in range(gl.program_id(0), 2 * work[0], gl.num_programs(0)):
        column = (4 + tile % 2 * 2) * K
        for inner in range(0, 2 * K, SIDE):
            _load_turn(x, two, rings, turn, tile // 2 * (2 * SIDE), column, 0, inner, _WIDE, TRANSPOSED)
            turn += 1
    first, last = _share(work)
    for tile in range(first, last):
        irrep = tile % 4
        weight_row = irrep * (K if TRANSPOSED else F)
        for inner in range(0, K, SIDE):
            row = tile // 4 * (2 * SIDE)
            _load_turn(x, one, rings, turn, row, irrep * K, weight_row, inner, _NARROW, TRANSPOSED)
            turn += 1


@gluon.constexpr_function
def _beside(shape, boxes, transposed):
    """So many boxes of weights as one."""
    number, rows, columns = shape
    return (
        [number // boxes, rows, boxes * columns] if transposed else [number // boxes, boxes * rows, columns]
    )


@gluon.jit
def _product(
    rings, turn, TURNS: gl.constexpr, GROUP: gl.constexpr, BOXES: gl.constexpr, TRANSPOSED: gl.constexpr
):
    """The product of a group's tokens, which takes so many turns."""
    tokens, weights, full, empty = rings
    COLUMNS: gl.constexpr = BOXES * SIDE
    shape: gl.constexpr = _beside(weights.shape, BOXES, TRANSPOSED)
    total = gl.zeros((SIDE, COLUMNS), gl.float32, layout=accumulators(COLUMNS))
    for step in range(TURNS):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        weight = view_as(weights, weights.dtype, shape, weights.layout).index(_WIDE // BOXES * stage)
        if not TRANSPOSED:
            weight = weight.permute((1, 0))
        total = warpgroup_mma(tokens.index(2 * stage + GROUP), weight, total, use_acc=step > 0, is_async=True)
        # The product before has ended.
        total = warpgroup_mma_wait(1, deps=(total,))
        mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1, pred=step > 0)
        turn += 1
    total = warpgroup_mma_wait(0, deps=(total,))
    mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
    return total


@gluon.jit
def _put(y, slots, row, column, value):
    """The columns of a product leave, 64 at a time, by way of two slots in turns."""
    COLUMNS: gl.constexpr = value.shape[1]
    if COLUMNS > SIDE:
        left, right = gl.split(value.reshape([SIDE, 2, COLUMNS // 2]).permute([0, 2, 1]))
        _put(y, slots, row, column, left)
        _put(y, slots, row, column + COLUMNS // 2, right)
    else:
        _put_box(y, slots, row, column, value)


@gluon.jit
def _put_box(y, slots, row, column, value):
    tma.store_wait(1)
    slot = slots.index(column // SIDE % 2)
    slot.store(value.to(y.dtype))
    fence_async_shared()
    store_box(y, [row, column], slot)


@gluon.jit
def _compute(y, rings, slots, work, GROUP: gl.constexpr, K: gl.constexpr, TRANSPOSED: gl.constexpr):
    """A group's tokens of one tile after the other."""
    turn = 0
    for tile in range(gl.program_id(0), 2 * work[0], gl.num_programs(0)):
        total = _product(rings, turn, 2 * K // SIDE, GROUP, _WIDE, TRANSPOSED)
        turn += 2 * K // SIDE
        _put(y, slots, (tile // 2 * 2 + GROUP) * SIDE, (4 + tile % 2 * 2) * F, total)
    first, last = _share(work)
    for tile in range(first, last):
        total = _product(rings, turn, K // SIDE, GROUP, _NARROW, TRANSPOSED)
        turn += K // SIDE
        _put(y, slots, (tile // 4 * 2 + GROUP) * SIDE, tile % 4 * F, total)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["blocks", "longer", "less", "more"])
def _long_linear(x, one, two, y, blocks, longer, less, more, K: gl.constexpr, TRANSPOSED: gl.constexpr):
    """y of x, which has so many blocks of 128 tokens; K is an eighth of the width of x.

    The `longer` first programs have a tile of E more than the others. Of other tiles they have `less`, those `more`.
    """
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    tokens = gl.allocate_shared_memory(x.dtype, [2 * STAGES, SIDE, SIDE], x.layout)
    weights = gl.allocate_shared_memory(x.dtype, [_WIDE * STAGES, SIDE, SIDE], one.layout)
    slots_0 = gl.allocate_shared_memory(x.dtype, [2, SIDE, SIDE], y.layout)
    slots_1 = gl.allocate_shared_memory(x.dtype, [2, SIDE, SIDE], y.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    rings, work = (tokens, weights, full, empty), (blocks, longer, less, more)
    gl.warp_specialize(
        [
            (_compute, (y, rings, slots_0, work, 0, K, TRANSPOSED)),
            (_compute, (y, rings, slots_1, work, 1, K, TRANSPOSED)),
            (_load_tiles, (x, one, two, rings, work, K, TRANSPOSED)),
        ],
        [4, 1],
        [_MANY, _FEW],
    )


@cache
def takes(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    """Whether the kernel is for a map from C channels to a width: in 16 bits, to 1024 from 2048 or more."""
    needed = 2 * 64 * 64 * (4 * 6 + 4) + 1024
    long = width == WIDTH and channels >= 2 * WIDTH and channels % 512 == 0
    return long and dtype.itemsize == 2 and shared_memory(device) >= needed


@lru_cache(maxsize=4096)
def _shares(blocks: int, programs: int) -> tuple[int, int, int]:
    """How many programs have a tile of E more than the others, and how many other tiles these and those have."""
    each, longer = divmod(2 * blocks, programs)
    total = 4 * each
    while True:
        total += 1
        less, more = max(total - 4 * (each + 1), 0), total - 4 * each
        if longer * less + (programs - longer) * more >= 4 * blocks:
            return longer, less, more


def linear(x: torch.Tensor, one: torch.Tensor, two: torch.Tensor, out: torch.Tensor) -> None:
    """W x of x[T, C] written to out[T, 1024]; one[4, 128, C/8], two[1, 256, C/4]."""
    if not len(x):
        return
    blocks = -(-len(x) // 128)
    programs = min(multiprocessors(x.device), 4 * blocks)
    transposed = one.stride(2) != 1
    if transposed:
        one, two = one.mT, two.mT
    box = (64, 64)
    with torch.cuda.device_of(x):
        _long_linear[(programs,)](
            in_boxes(x, box),
            in_boxes(one.flatten(0, 1), box),
            in_boxes(two.flatten(0, 1), box),
            in_boxes(out, box),
            blocks,
            *_shares(blocks, programs),
            K=x.shape[1] // 8,
            TRANSPOSED=transposed,
            num_warps=4,
            # What is left of a multiprocessor's registers for 12 warps.
            maxnreg=168,
        )
