"""The octic linear map on NVIDIA's Hopper, with the weights at rest.

    y_ρ = W_ρ x_ρ  for A1 A2 B1 B2          and          y_j = W_E x_j  for both components of E

The inner dimension is an eighth or a quarter of the width: there is little to compute for what is read and written.
A program keeps the weights of some columns of the result in shared memory, a panel, and blocks of 64 tokens stream
past them. Panels of the first kind are 128 columns of each one-dimensional irrep, those of the second 256 of E; both
are as large, and so is what they write, 512 columns. Two groups of four warps take half of the columns each, and one
warp loads. A block of tokens comes in four parts, one per irrep or two per component, and a part in slices.

Buffers are handed over by barriers: `full` says that one was loaded, `empty` that it may be loaded again.

The result is packed, or lies in runs: of each head its c entries of A1 A2 B1 B2 side by side, then of each head its
2c of both components of E. Attention reads these faster. A tile of runs has several irreps in it, so products that
take one irrep after the other cannot write it.

Triton itself does not say which warps do what, so this is written in Gluon, which comes with it.
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

from quickvit.ops.triton.boxes import accumulators, factors, in_boxes, load_box, store_box, view_as
from quickvit.ops.triton.launch import multiprocessors, shared_memory

# Numbers of channels at which it is faster than products of cuBLAS; at 1280 it is not, for want of room.
CHANNELS = (768, 1024)
SIDE = gl.constexpr(64)
# Registers of a thread that loads, and of one that computes.
_FEW, _MANY = gl.constexpr(40), gl.constexpr(232)


@gluon.constexpr_function
def _wide(shape, transposed):
    """Two boxes of weights as one of twice as many columns."""
    boxes, rows, columns = shape
    return [boxes // 2, rows, 2 * columns] if transposed else [boxes // 2, 2 * rows, columns]


@gluon.jit
def _share(work):
    """What is this program's: the first part of a block of tokens, the panel, and the range of blocks."""
    blocks, panels, ones, twos = work
    program = gl.program_id(0)
    if program < panels * ones:
        part = 0
        step = ones
    else:
        part = 4
        step = twos
        program -= panels * ones
    return part, program % panels, program // panels, blocks, step


@gluon.jit
def _load_everything(
    x,
    one,
    two,
    weights,
    tokens,
    work,
    M: gl.constexpr,
    F: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """The weights of the panel, and one block of tokens after the other."""
    PIECES: gl.constexpr = M // STEP
    first, panel, begin, blocks, step = _share(work)
    buffers, ready = weights
    mbarrier.expect(ready, 8 * SIDE * M * 2)
    for part in gl.static_range(8):
        for piece in gl.static_range(PIECES):
            if first == 0:
                # Of each group of warps four irreps.
                column = panel * (2 * SIDE) + part // 4 * SIDE
                inner = piece * STEP
                buffer = buffers.index(part * PIECES + piece)
                if TRANSPOSED:
                    load_box(one, [part % 4 * M + inner, column], ready, buffer)
                else:
                    load_box(one, [part % 4 * F + column, inner], ready, buffer)
            else:
                # Of each group two halves of the inner dimension, and of these two halves of the columns.
                column = panel * (4 * SIDE) + (part // 4 * 2 + part % 2) * SIDE
                inner = part // 2 % 2 * M + piece * STEP
                buffer = buffers.index((part // 2 * PIECES + piece) * 2 + part % 2)
                if TRANSPOSED:
                    load_box(two, [inner, column], ready, buffer)
                else:
                    load_box(two, [column, inner], ready, buffer)
    ring, full, empty = tokens
    turn = 0
    for block in range(begin, blocks, step):
        for part in gl.static_range(4):
            stage = turn % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(ready, SIDE * M * 2)
            for piece in gl.static_range(PIECES):
                corner = [block * SIDE, (first + part) * M + piece * STEP]
                load_box(x, corner, ready, ring.index(stage * PIECES + piece))
            turn += 1


@gluon.jit
def _times(
    tokens,
    turn,
    weights,
    FIRST: gl.constexpr,
    total,
    MORE: gl.constexpr,
    NEW: gl.constexpr,
    PIECES: gl.constexpr,
    STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """The tokens of a turn times weights, with MORE added to the total; it only begins.

    By then the product before has ended, unless it is the first of a block, and its tokens are released.
    """
    ring, full, empty = tokens
    mbarrier.wait(full.index(turn % STAGES), turn // STAGES & 1)
    for piece in gl.static_range(PIECES):
        weight = weights.index(FIRST * PIECES + piece)
        if not TRANSPOSED:
            weight = weight.permute((1, 0))
        token = ring.index(turn % STAGES * PIECES + piece)
        total = warpgroup_mma(token, weight, total, use_acc=MORE or piece > 0, is_async=True)
    if not NEW:
        total = warpgroup_mma_wait(PIECES, deps=(total,))
        mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
    return total


@gluon.jit
def _quartet(
    tokens,
    turn,
    weights,
    GROUP: gl.constexpr,
    PIECES: gl.constexpr,
    STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """The products of A1 A2 B1 B2 of a block of tokens."""
    W: gl.constexpr = 4 * GROUP
    none = gl.zeros((SIDE, SIDE), gl.float32, layout=accumulators(SIDE))
    a1 = _times(tokens, turn, weights, W, none, False, True, PIECES, STAGES, TRANSPOSED)
    a2 = _times(tokens, turn + 1, weights, W + 1, none, False, False, PIECES, STAGES, TRANSPOSED)
    b1 = _times(tokens, turn + 2, weights, W + 2, none, False, False, PIECES, STAGES, TRANSPOSED)
    b2 = _times(tokens, turn + 3, weights, W + 3, none, False, False, PIECES, STAGES, TRANSPOSED)
    a1, a2, b1, b2 = warpgroup_mma_wait(0, deps=(a1, a2, b1, b2))
    mbarrier.arrive(tokens[2].index((turn + 3) % STAGES), count=1)
    return a1, a2, b1, b2


@gluon.jit
def _pair(
    tokens,
    turn,
    weights,
    GROUP: gl.constexpr,
    PIECES: gl.constexpr,
    STAGES: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """The products of both components of E, of twice as many columns, and sums of two."""
    W: gl.constexpr = 2 * GROUP
    none = gl.zeros((SIDE, 2 * SIDE), gl.float32, layout=accumulators(2 * SIDE))
    e1 = _times(tokens, turn, weights, W, none, False, True, PIECES, STAGES, TRANSPOSED)
    e1 = _times(tokens, turn + 1, weights, W + 1, e1, True, False, PIECES, STAGES, TRANSPOSED)
    e2 = _times(tokens, turn + 2, weights, W, none, False, False, PIECES, STAGES, TRANSPOSED)
    e2 = _times(tokens, turn + 3, weights, W + 1, e2, True, False, PIECES, STAGES, TRANSPOSED)
    e1, e2 = warpgroup_mma_wait(0, deps=(e1, e2))
    mbarrier.arrive(tokens[2].index((turn + 3) % STAGES), count=1)
    return e1, e2


@gluon.jit
def _halves(value):
    """The left and the right half of the columns."""
    half: gl.constexpr = value.shape[1] // 2
    return gl.split(value.reshape([SIDE, 2, half]).permute([0, 2, 1]))


@gluon.jit
def _run_of_four(a1, a2, b1, b2, c: gl.constexpr):
    """Of each head its pieces of A1 A2 B1 B2, side by side."""
    columns: gl.constexpr = a1.shape[1]
    four = gl.join(gl.join(a1, b1), gl.join(a2, b2)).reshape([SIDE, columns // c, c, 4])
    return four.permute([0, 1, 3, 2]).reshape([SIDE, 4 * columns])


@gluon.jit
def _run_of_two(e1, e2, c: gl.constexpr):
    """Of each head its pieces of both components of E."""
    columns: gl.constexpr = e1.shape[1]
    two = gl.join(e1, e2).reshape([SIDE, columns // (2 * c), 2 * c, 2])
    return two.permute([0, 1, 3, 2]).reshape([SIDE, 2 * columns])


@gluon.jit
def _put(y, slots, NUMBER: gl.constexpr, row, column, value):
    """A tile leaves by way of one of the slots, once what was there before has left."""
    tma.store_wait(len(slots) - 1)
    slot = slots[NUMBER % len(slots)]
    slot.store(value.to(y.dtype))
    fence_async_shared()
    store_box(y, [row, column], slot)


@gluon.jit
def _compute(
    y,
    row_scale,
    bias,
    weights,
    tokens,
    slots,
    work,
    count,
    GROUP: gl.constexpr,
    M: gl.constexpr,
    F: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    c: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """A group's columns of one block of tokens after the other."""
    PIECES: gl.constexpr = M // STEP
    buffers, ready = weights
    first, panel, begin, blocks, step = _share(work)
    mbarrier.wait(ready, 0)
    turn = 0
    if first == 0:
        column = (2 * panel + GROUP) * SIDE
        for block in range(begin, blocks, step):
            row = block * SIDE
            a1, a2, b1, b2 = _quartet(tokens, turn, buffers, GROUP, PIECES, STAGES, TRANSPOSED)
            turn += 4
            if row_scale is not None:
                factor = factors(row_scale, row, count, accumulators(SIDE))
                a1, a2, b1, b2 = a1 * factor, a2 * factor, b1 * factor, b2 * factor
            if bias is not None:
                lane = gl.arange(0, SIDE, layout=gl.SliceLayout(0, accumulators(SIDE)))
                a1 += gl.load(bias + column + lane).to(gl.float32)[None, :]
            if c == 0:
                _put(y, slots, 0, row, column, a1)
                _put(y, slots, 1, row, column + F, a2)
                _put(y, slots, 2, row, column + 2 * F, b1)
                _put(y, slots, 3, row, column + 3 * F, b2)
            else:
                a1, a1_right = _halves(a1)
                a2, a2_right = _halves(a2)
                b1, b1_right = _halves(b1)
                b2, b2_right = _halves(b2)
                _put(y, slots, 0, row, 4 * column, _run_of_four(a1, a2, b1, b2, c))
                right = _run_of_four(a1_right, a2_right, b1_right, b2_right, c)
                _put(y, slots, 1, row, 4 * column + 2 * SIDE, right)
    else:
        column = (2 * panel + GROUP) * 2 * SIDE
        wide = view_as(buffers, buffers.dtype, _wide(buffers.shape, TRANSPOSED), buffers.layout)
        for block in range(begin, blocks, step):
            row = block * SIDE
            e1, e2 = _pair(tokens, turn, wide, GROUP, PIECES, STAGES, TRANSPOSED)
            turn += 4
            if row_scale is not None:
                factor = factors(row_scale, row, count, accumulators(2 * SIDE))
                e1, e2 = e1 * factor, e2 * factor
            e1, e1_right = _halves(e1)
            e2, e2_right = _halves(e2)
            if c == 0:
                _put(y, slots, 0, row, 4 * F + column, e1)
                _put(y, slots, 1, row, 4 * F + column + SIDE, e1_right)
                _put(y, slots, 2, row, 6 * F + column, e2)
                _put(y, slots, 3, row, 6 * F + column + SIDE, e2_right)
            else:
                _put(y, slots, 0, row, 4 * F + 2 * column, _run_of_two(e1, e2, c))
                right = _run_of_two(e1_right, e2_right, c)
                _put(y, slots, 1, row, 4 * F + 2 * (column + SIDE), right)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["count", "blocks", "panels", "ones", "twos"])
def _octic_linear(
    x,
    one,
    two,
    row_scale,
    bias,
    y,
    count,
    blocks,
    panels,
    ones,
    twos,
    M: gl.constexpr,
    F: gl.constexpr,
    STEP: gl.constexpr,
    STAGES: gl.constexpr,
    c: gl.constexpr,
    TRANSPOSED: gl.constexpr,
):
    """y of x, so many tokens; M and F are eighths of their widths, c the entries in a piece of a head, 0 if packed.

    Each panel of the first kind has `ones` programs, each of the second `twos`.
    """
    PIECES: gl.constexpr = M // STEP
    box: gl.constexpr = one.block_type.shape
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = gl.allocate_shared_memory(x.dtype, [8 * PIECES, box[0], box[1]], one.layout)
    ring = gl.allocate_shared_memory(x.dtype, [STAGES * PIECES, SIDE, STEP], x.layout)
    tile: gl.constexpr = y.block_type.shape
    slots_0 = (gl.allocate_shared_memory(x.dtype, tile, y.layout),)
    slots_1 = (gl.allocate_shared_memory(x.dtype, tile, y.layout),)
    if c == 0:
        slots_0 = (slots_0[0], gl.allocate_shared_memory(x.dtype, tile, y.layout))
        slots_1 = (slots_1[0], gl.allocate_shared_memory(x.dtype, tile, y.layout))
    ready = gl.allocate_shared_memory(gl.int64, [1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=2)
    weights, tokens, work = (buffers, ready), (ring, full, empty), (blocks, panels, ones, twos)
    gl.warp_specialize(
        [
            (
                _compute,
                (
                    y,
                    row_scale,
                    bias,
                    weights,
                    tokens,
                    slots_0,
                    work,
                    count,
                    0,
                    M,
                    F,
                    STEP,
                    STAGES,
                    c,
                    TRANSPOSED,
                ),
            ),
            (
                _compute,
                (
                    y,
                    row_scale,
                    bias,
                    weights,
                    tokens,
                    slots_1,
                    work,
                    count,
                    1,
                    M,
                    F,
                    STEP,
                    STAGES,
                    c,
                    TRANSPOSED,
                ),
            ),
            (_load_everything, (x, one, two, weights, tokens, work, M, F, STEP, STAGES, TRANSPOSED)),
        ],
        [4, 1],
        [_MANY, _FEW],
    )


def _stages(m: int, limit: int) -> int:
    """How many parts of a block of tokens fit into `limit` bytes of shared memory, at most those of two blocks."""
    barriers, part, tile = 1024, 2 * 64 * m, 2 * 64 * 128
    return min((limit - barriers - 8 * part - 2 * tile) // part, 8)


@cache
def takes(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    """Whether the kernel is for a map from C channels to a width: in 16 bits, where it was seen to be faster."""
    if channels not in CHANNELS or width % 1024 or dtype.itemsize != 2:
        return False
    return _stages(channels // 8, shared_memory(device)) >= 4


@lru_cache(maxsize=4096)
def _programs(blocks: int, panels: int, most: int) -> tuple[int, int]:
    """How many programs panels of the first and of the second kind have, so that all end at about the same time.

    Both kinds write as much for a block of tokens. The second has twice the products, most of which are hidden.
    """
    each = max(most // panels, 2)

    def time(ones: int) -> int:
        return max(5 * -(-blocks // ones), 6 * -(-blocks // (each - ones)))

    ones = min(range(1, each), key=time)
    return min(ones, blocks), min(each - ones, blocks)


def _launch(
    x: torch.Tensor, one: torch.Tensor, two: torch.Tensor, row_scale, bias, y: torch.Tensor, piece: int
) -> None:
    tokens, channels = x.shape
    if not tokens:
        return
    m, f = channels // 8, y.shape[1] // 8
    step = 64 if m % 64 == 0 else 32
    blocks, panels = -(-tokens // 64), f // 128
    ones, twos = _programs(blocks, panels, multiprocessors(x.device))
    transposed = one.stride(2) != 1
    if transposed:
        one, two = one.mT, two.mT
    box = (step, 64) if transposed else (64, step)
    with torch.cuda.device_of(x):
        _octic_linear[(panels * (ones + twos),)](
            in_boxes(x, (64, step)),
            in_boxes(one.flatten(0, 1), box),
            in_boxes(two.flatten(0, 1), box),
            row_scale,
            bias,
            in_boxes(y, (64, 128 if piece else 64)),
            # Who has no factors does not ask, and is the same kernel as without them.
            None if row_scale is None else tokens,
            blocks,
            panels,
            ones,
            twos,
            M=m,
            F=f,
            STEP=step,
            STAGES=_stages(m, shared_memory(x.device)),
            c=piece,
            TRANSPOSED=transposed,
            num_warps=4,
            # What is left of a multiprocessor's registers for 12 warps.
            maxnreg=168,
        )


def linear(x: torch.Tensor, one: torch.Tensor, two: torch.Tensor, out: torch.Tensor) -> None:
    """W x of x[T, C] written to out[T, 8F]; one[4, F, C/8], two[1, 2F, C/4]."""
    _launch(x, one, two, None, None, out, 0)


def linear_heads(
    x: torch.Tensor,
    one: torch.Tensor,
    two: torch.Tensor,
    bias: torch.Tensor | None,
    piece: int,
    row_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """W x + b of x[T, C] in channels [2, heads, 4c]: of each head its pieces A1 A2 B1 B2, then of each those of E.

    row_scale[T], in float32, is what tokens are multiplied by before the bias.
    """
    out = x.new_empty(x.shape[0], 8 * one.shape[1])
    _launch(x, one, two, row_scale, bias, out, piece)
    return out
