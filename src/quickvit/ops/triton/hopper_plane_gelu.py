"""GELU with the products of E before it in one kernel, on NVIDIA's Hopper, of tokens whose channels do not all fit.

    y = Qᵀ GELU(Q (s W x + b e_A1))        y holds W x of A1 A2 B1 B2; s = 1, or what a norm multiplies a token by

It is the kernel of `hopper_gelu.py` for more channels: only those of E are in shared memory. The other four blocks of
a tile are read from the result itself, up to two tiles ahead, and GELU then takes their place. All pieces of a
component are boxes of 64 channels: the last may have channels of what follows, whose weights are zeros.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from quickvit.ops.triton.boxes import accumulators, in_boxes, load_box, view_as
from quickvit.ops.triton.hopper_gelu import (
    BLOCKS,
    CHUNK,
    COLUMNS,
    FEW,
    ROWS,
    SOME,
    WARPS,
    activate_rows,
    in_chunks,
    leave_twos,
    new_box,
)
from quickvit.ops.triton.launch import multiprocessors, shared_memory
from quickvit.ops.triton.streamed import begin, share

# Channels of a box, the most boxes of a component of E, and the most channels that the other kernel takes.
STEP = gl.constexpr(64)
MOST_PIECES = 7
OTHERS = 1280
# Turns of weights in shared memory, and tiles of lines.
STAGES = gl.constexpr(8)
TURNS = gl.constexpr(2)
# Irreps of one dimension.
LINES = gl.constexpr(4)


@gluon.jit
def _new_ring(dtype: gl.constexpr, NUMBER: gl.constexpr, SIZE: gl.constexpr, WIDTH: gl.constexpr):
    """Shared memory for a number of groups of so many boxes, which are filled in turns, and barriers of each."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, WIDTH], dtype)
    ring = gl.allocate_shared_memory(dtype, [NUMBER * SIZE, ROWS, WIDTH], layout)
    full = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], barrier)
    for stage in gl.static_range(NUMBER):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    return ring, full, empty


@gluon.jit
def _load_tokens(x, tokens, tiles, TILES: gl.constexpr, M: gl.constexpr):
    """Both components of E, of one block of tokens after the other."""
    ring, full, empty = tokens
    PIECES: gl.constexpr = ring.shape[0] // 2
    first, last = share(tiles)
    phase = 0
    for block in range(first // TILES, (last + TILES - 1) // TILES):
        mbarrier.wait(empty.index(0), phase ^ 1)
        mbarrier.expect(full.index(0), ring.shape[0] * ROWS * STEP * 2)
        for piece in gl.static_range(2 * PIECES):
            channel = (LINES + 2 * (piece // PIECES)) * M + piece % PIECES * STEP
            load_box(x, [block * ROWS, channel], full.index(0), ring.index(piece))
        phase ^= 1


@gluon.jit
def _load_weights(two, weights, tiles, TILES: gl.constexpr, PIECES: gl.constexpr):
    """The weights of one tile after the other, those of both copies of E at a time."""
    ring, full, empty = weights
    first, last = share(tiles)
    turn = 0
    for tile in range(first, last):
        for piece in range(PIECES):
            stage = turn % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(ready, 2 * COLUMNS * STEP * 2)
            buffer = view_as(ring.index(stage), two.dtype, two.block_type.shape, two.layout)
            load_box(two, [0, tile % TILES * COLUMNS, piece * STEP], ready, buffer)
            turn += 1


@gluon.jit
def _load_lines(y, lines, tiles, TILES: gl.constexpr, F: gl.constexpr):
    """The blocks of one tile after the other that are in y."""
    ring, full, empty = lines
    first, last = share(tiles)
    for tile in range(first, last):
        turn = tile - first
        stage = turn % TURNS
        mbarrier.wait(empty.index(stage), (turn // TURNS & 1) ^ 1)
        mbarrier.expect(full.index(stage), LINES * ROWS * COLUMNS * 2)
        for line in gl.static_range(LINES):
            corner = [tile // TILES * ROWS, line * F + tile % TILES * COLUMNS]
            load_box(y, corner, full.index(stage), ring.index(LINES * stage + line))


@gluon.jit
def _multiply(tokens, weights, box, tiles, TILES: gl.constexpr):
    """The products of one tile after the other, each left in the box for GELU."""
    x, tokens_full, tokens_empty = tokens
    ring, full, empty = weights
    blocks, box_full, box_empty = box
    PIECES: gl.constexpr = x.shape[0] // 2
    first, last = share(tiles)
    turn = 0
    phase = 0
    times = 0
    for block in range(first // TILES, (last + TILES - 1) // TILES):
        mbarrier.wait(tokens_full.index(0), phase)
        end = min(last, (block + 1) * TILES)
        for tile in range(max(first, block * TILES), end):
            e1 = gl.zeros((ROWS, 2 * COLUMNS), gl.float32, layout=accumulators(2 * COLUMNS))
            e2 = e1
            for piece in range(PIECES):
                stage = turn % STAGES
                mbarrier.wait(full.index(stage), turn // STAGES & 1)
                right = ring.index(stage)
                e1 = begin(x.index(piece), right, e1, piece > 0)
                e2 = begin(x.index(PIECES + piece), right, e2, piece > 0)
                # Those of the last turn have ended, whose weights then go.
                e1, e2 = warpgroup_mma_wait(2, deps=(e1, e2))
                mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1, pred=piece > 0)
                turn += 1
            e1, e2 = warpgroup_mma_wait(0, deps=(e1, e2))
            mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
            mbarrier.arrive(tokens_empty.index(0), count=1, pred=tile + 1 >= end)
            mbarrier.wait(box_empty, times ^ 1)
            leave_twos(blocks, e1, e2)
            mbarrier.arrive(box_full, count=1)
            times ^= 1
        phase ^= 1


@gluon.jit
def _activate(y, row_scale, bias, lines, box, count, tiles, TILES: gl.constexpr, F: gl.constexpr):
    """GELU of one tile after the other, stored to y, which has so many tokens."""
    ring, full, empty = lines
    blocks, box_full, box_empty = box
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [WARPS, 1], [1, 0])
    lane = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    line = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
    first, last = share(tiles)
    for tile in range(first, last):
        turn = tile - first
        stage = turn % TURNS
        row = tile // TILES * ROWS
        column = tile % TILES * COLUMNS
        shift = gl.zeros((COLUMNS,), gl.float32, layout=gl.SliceLayout(0, layout))
        if bias is not None:
            shift += gl.load(bias + column + lane).to(gl.float32)
        place = y + (row + line).to(gl.int64)[:, None] * (BLOCKS * F) + (column + lane)[None, :]
        chunks = ()
        for block in gl.static_range(LINES):
            chunks += (in_chunks(ring.index(LINES * stage + block)),)
        for block in gl.static_range(BLOCKS - LINES):
            chunks += (in_chunks(blocks[block]),)
        mbarrier.wait(full.index(stage), turn // TURNS & 1)
        mbarrier.wait(box_full, turn & 1)
        for chunk in range(ROWS // CHUNK):
            token = row + chunk * CHUNK + line
            factor = None
            if row_scale is not None:
                factor = gl.load(row_scale + token, mask=token < count, other=0.0)
            activate_rows(chunks, chunk, factor, shift, place, (token < count)[:, None], layout, F)
            place += CHUNK * BLOCKS * F
        mbarrier.arrive(empty.index(stage), count=1)
        mbarrier.arrive(box_empty, count=1)


@gluon.jit(do_not_specialize=["count", "tiles"])
def _plane_gelu(x, two, row_scale, bias, lines, y, count, tiles, F: gl.constexpr, M: gl.constexpr):
    """y of x and of y itself, of so many tokens, whose `lines` are its boxes; F and M are eighths of the widths."""
    PIECES: gl.constexpr = (2 * M + STEP - 1) // STEP
    TILES: gl.constexpr = F // COLUMNS
    tokens = _new_ring(x.dtype, 1, 2 * PIECES, STEP)
    weights = _new_ring(x.dtype, STAGES, 1, STEP)
    ring = _new_ring(x.dtype, TURNS, LINES, COLUMNS)
    box = new_box(x.dtype, BLOCKS - LINES)
    gl.warp_specialize(
        [
            (_multiply, (tokens, weights, box, tiles, TILES)),
            (_activate, (y, row_scale, bias, ring, box, count, tiles, TILES, F)),
            (_load_tokens, (x, tokens, tiles, TILES, M)),
            (_load_weights, (two, weights, tiles, TILES, PIECES)),
            (_load_lines, (lines, ring, tiles, TILES, F)),
        ],
        [WARPS, 1, 1, 1],
        [SOME, FEW, FEW, FEW],
    )


@cache
def takes(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    """Whether there is a kernel from C channels to a width: in 16 bits, from more than 1280 to 1792."""
    pieces = -(-channels // 4 // STEP.value)
    fits = channels > OTHERS and pieces <= MOST_PIECES
    if not fits or channels % 32 or width % 256 or dtype.itemsize != 2:
        return False
    needed = 2 * (2 * pieces + STAGES.value + 2 * TURNS.value + 2) * 64 * 64 + 1024
    return shared_memory(device) >= needed


def plane_gelu(
    x: torch.Tensor,
    two: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    row_scale: torch.Tensor | None = None,
) -> None:
    """GELU(s W x + b) of x[T, C] written to out[T, 8F], which is contiguous and holds W x of A1 A2 B1 B2.

    two[1, 2F, C/4] is W of E, and s the row_scale[T], in float32, or 1.
    """
    if not len(x):
        return
    f = out.shape[1] // 8
    tiles = -(-len(x) // 64) * (f // 32)
    with torch.cuda.device_of(x):
        _plane_gelu[(min(tiles, multiprocessors(x.device)),)](
            in_boxes(x, (64, 64)),
            in_boxes(two.view(2, f, -1), (2, 32, 64)),
            row_scale,
            bias,
            in_boxes(out, (64, 32)),
            out,
            len(x),
            tiles,
            F=f,
            M=x.shape[1] // 8,
            num_warps=4,
            # What is left of a multiprocessor's registers for 24 warps.
            maxnreg=80,
        )
