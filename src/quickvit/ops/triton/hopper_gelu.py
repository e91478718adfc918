"""A linear map from 1024 channels and GELU in one kernel, on NVIDIA's Hopper.

    y = Qᵀ GELU(Q (W x + b e_A1))

GELU mixes entry i of each of the eight blocks of a hidden feature, so a tile of the result is 64 tokens by the same
32 columns of all eight blocks. A program keeps all channels of its 64 tokens in shared memory and lets the weights
stream past them. One group of four warps multiplies and leaves tiles in shared memory, by turns for two other
groups, which apply GELU and store the result. Two more warps load. GELU's arithmetic takes as long as the products,
which is why it has warps of its own.

A program's share is a range of tiles, one block of tokens after the other. Buffers are handed over by barriers:
`full` says that one was filled, `empty` that it may be filled again. The weights of a tile come in eight turns:
those of A1 A2 B1 B2, then a quarter of the inner dimension of E each, which both components meet.
"""

import math
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quickvit.ops.triton.gelu import gelu_of, to_isotypic, to_regular
from quickvit.ops.triton.hopper import _accumulators, _boxes, _load, _view
from quickvit.ops.triton.launch import multiprocessors, shared_memory

CHANNELS = 1024
ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(32)
BLOCKS = gl.constexpr(8)
# Channels of a block, and those of a box.
M = gl.constexpr(CHANNELS // 8)
STEP = gl.constexpr(64)
TURNS = gl.constexpr(8)
# Turns of weights in shared memory, and rows of a tile that GELU is applied to at a time.
STAGES = gl.constexpr(4)
CHUNK = gl.constexpr(16)
# Registers of a thread that loads, and of one that applies GELU.
_FEW, _SOME = gl.constexpr(40), gl.constexpr(128)

# Φ(z) ≈ σ(p(z)) = (1 + tanh(p(z) / 2)) / 2 with an odd polynomial p of degree 3, found like that of `gelu.py`. Its
# error of GELU is 2.7e-4, that of the hardware's tanh 2.4e-4 z; the rounding of bfloat16 is up to 2e-3 z.
LOGIT = (1.6003141368961904, 6.940179590438844e-2)
_S = math.sqrt(2) / 4
_P0, _P1 = (gl.constexpr(p * _S ** (2 * k + 1) / 2) for k, p in enumerate(LOGIT))


@gluon.jit
def _share(tiles):
    """The first of this program's tiles, and the first that is no longer one."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return tiles * program // programs, tiles * (program + 1) // programs


@gluon.jit
def _load_tokens(x, tokens, tiles, F: gl.constexpr):
    """One block of tokens after the other."""
    buffers, full, empty = tokens
    TILES: gl.constexpr = F // COLUMNS
    first, last = _share(tiles)
    phase = 0
    for block in range(first // TILES, (last + TILES - 1) // TILES):
        mbarrier.wait(empty, phase ^ 1)
        mbarrier.expect(full, ROWS * BLOCKS * M * 2)
        for piece in gl.static_range(BLOCKS * M // STEP):
            _load(x, [block * ROWS, piece * STEP], full, buffers.index(piece))
        phase ^= 1


@gluon.jit
def _load_weights(one, two, weights, tiles, F: gl.constexpr):
    """The weights of one tile after the other."""
    ring, full, empty = weights
    first, last = _share(tiles)
    turn = 0
    for tile in range(first, last):
        column = tile % (F // COLUMNS) * COLUMNS
        for block in gl.static_range(TURNS):
            stage = turn % STAGES
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
            mbarrier.expect(ready, 2 * COLUMNS * STEP * 2)
            for half in gl.static_range(2):
                buffer = ring.index(2 * stage + half)
                if block < 4:
                    _load(one, [block * F + column, half * STEP], ready, buffer)
                else:
                    # Of both copies of E, one below the other.
                    _load(two, [half * F + column, (block - 4) * STEP], ready, buffer)
            turn += 1


@gluon.jit
def _begin_one(x, BLOCK: gl.constexpr, weights, turn, total):
    """The product of a one-dimensional irrep begins."""
    ring, full, _ = weights
    mbarrier.wait(full.index(turn % STAGES), turn // STAGES & 1)
    for half in gl.static_range(2):
        weight = ring.index(turn % STAGES * 2 + half).permute((1, 0))
        total = warpgroup_mma(x.index(2 * BLOCK + half), weight, total, use_acc=half > 0, is_async=True)
    return total


@gluon.jit
def _begin_two(x, QUARTER: gl.constexpr, weights, turn, e1, e2):
    """A quarter of the products of both components of E begins."""
    ring, full, _ = weights
    mbarrier.wait(full.index(turn % STAGES), turn // STAGES & 1)
    wide = _view(ring, ring.dtype, [STAGES, STEP, STEP], ring.layout)
    weight = wide.index(turn % STAGES).permute((1, 0))
    e1 = warpgroup_mma(x.index(8 + QUARTER), weight, e1, use_acc=QUARTER > 0, is_async=True)
    e2 = warpgroup_mma(x.index(12 + QUARTER), weight, e2, use_acc=QUARTER > 0, is_async=True)
    return e1, e2


@gluon.jit
def _release(weights, turn):
    mbarrier.arrive(weights[2].index(turn % STAGES), count=1)


@gluon.jit
def _multiply(tokens, weights, boxes, tiles, F: gl.constexpr):
    """The products of one tile after the other, each left in the box of the group whose turn it is.

    Each product begins before the last one has ended, whose weights then go.
    """
    x, tokens_full, tokens_empty = tokens
    TILES: gl.constexpr = F // COLUMNS
    first, last = _share(tiles)
    none = gl.zeros((ROWS, COLUMNS), gl.float32, layout=_accumulators(COLUMNS))
    none_two = gl.zeros((ROWS, 2 * COLUMNS), gl.float32, layout=_accumulators(2 * COLUMNS))
    turn = 0
    phase = 0
    for block in range(first // TILES, (last + TILES - 1) // TILES):
        mbarrier.wait(tokens_full, phase)
        end = min(last, (block + 1) * TILES)
        for tile in range(max(first, block * TILES), end):
            a1 = _begin_one(x, 0, weights, turn, none)
            a2 = _begin_one(x, 1, weights, turn + 1, none)
            a1 = warpgroup_mma_wait(2, deps=(a1,))
            _release(weights, turn)
            b1 = _begin_one(x, 2, weights, turn + 2, none)
            a2 = warpgroup_mma_wait(2, deps=(a2,))
            _release(weights, turn + 1)
            b2 = _begin_one(x, 3, weights, turn + 3, none)
            b1 = warpgroup_mma_wait(2, deps=(b1,))
            _release(weights, turn + 2)
            e1, e2 = _begin_two(x, 0, weights, turn + 4, none_two, none_two)
            b2 = warpgroup_mma_wait(2, deps=(b2,))
            _release(weights, turn + 3)
            e1, e2 = _begin_two(x, 1, weights, turn + 5, e1, e2)
            e1, e2 = warpgroup_mma_wait(2, deps=(e1, e2))
            _release(weights, turn + 4)
            e1, e2 = _begin_two(x, 2, weights, turn + 6, e1, e2)
            e1, e2 = warpgroup_mma_wait(2, deps=(e1, e2))
            _release(weights, turn + 5)
            e1, e2 = _begin_two(x, 3, weights, turn + 7, e1, e2)
            e1, e2 = warpgroup_mma_wait(2, deps=(e1, e2))
            _release(weights, turn + 6)
            number = turn // TURNS
            # While the last products of E go on, the others leave.
            if number % 2 == 0:
                _leave_ones(boxes[0], number // 2, a1, a2, b1, b2)
            else:
                _leave_ones(boxes[1], number // 2, a1, a2, b1, b2)
            e1, e2 = warpgroup_mma_wait(0, deps=(e1, e2))
            _release(weights, turn + 7)
            mbarrier.arrive(tokens_empty, count=1, pred=tile + 1 >= end)
            if number % 2 == 0:
                _leave_twos(boxes[0], e1, e2)
            else:
                _leave_twos(boxes[1], e1, e2)
            turn += TURNS
        phase ^= 1


@gluon.jit
def _leave_ones(box, times, a1, a2, b1, b2):
    """Leave blocks of a tile to a group, once it has read the one before; `times` it had one."""
    blocks, _, empty = box
    mbarrier.wait(empty, times & 1 ^ 1)
    blocks[0].store(a1.to(blocks[0].dtype))
    blocks[1].store(a2.to(blocks[0].dtype))
    blocks[2].store(b1.to(blocks[0].dtype))
    blocks[3].store(b2.to(blocks[0].dtype))


@gluon.jit
def _leave_twos(box, e1, e2):
    """Leave the rest of a tile to a group, and say that it is full."""
    blocks, full, _ = box
    e11, e21 = _copies(e1)
    e12, e22 = _copies(e2)
    blocks[4].store(e11.to(blocks[0].dtype))
    blocks[5].store(e21.to(blocks[0].dtype))
    blocks[6].store(e12.to(blocks[0].dtype))
    blocks[7].store(e22.to(blocks[0].dtype))
    mbarrier.arrive(full, count=1)


@gluon.jit
def _copies(value):
    return gl.split(value.reshape([ROWS, 2, COLUMNS]).permute([0, 2, 1]))


@gluon.jit
def _gelu(t, FAST: gl.constexpr):
    """t Φ(s t) / 8, see `gelu_of`."""
    if FAST:
        value = _tanh(t * gl.fma(t * t, _P1, _P0))
        eighth = t * 0.0625
        result = gl.fma(eighth, value, eighth)
    else:
        result = gelu_of(t, False)
    return result


@gluon.jit
def _tanh(t):
    return gl.inline_asm_elementwise(
        "tanh.approx.f32 $0, $1;", "=f,f", [t], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _gelu_of_octet(values, FAST: gl.constexpr):
    """GELU of eight blocks of entries, by way of the regular domain."""
    t0, t1, t2, t3, t4, t5, t6, t7 = to_regular(
        values[0], values[1], values[2], values[3], values[4], values[5], values[6], values[7]
    )
    return to_isotypic(
        _gelu(t0, FAST),
        _gelu(t1, FAST),
        _gelu(t2, FAST),
        _gelu(t3, FAST),
        _gelu(t4, FAST),
        _gelu(t5, FAST),
        _gelu(t6, FAST),
        _gelu(t7, FAST),
    )


@gluon.jit
def _activate(y, bias, box, tokens, tiles, GROUP: gl.constexpr, F: gl.constexpr):
    """GELU of every other tile, some rows after the others, stored to y, which has so many `tokens`.

    All rows at once would be thousands of instructions without a loop.
    """
    TILES: gl.constexpr = F // COLUMNS
    FAST: gl.constexpr = y.dtype.element_ty == gl.bfloat16
    blocks, full, empty = box
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    lane = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    line = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
    chunks = ()
    for block in gl.static_range(BLOCKS):
        memory = blocks[block]
        chunks += (_view(memory, memory.dtype, [ROWS // CHUNK, CHUNK, COLUMNS], memory.layout),)
    first, last = _share(tiles)
    phase = 0
    for tile in range(first + GROUP, last, 2):
        row = tile // TILES * ROWS
        column = tile % TILES * COLUMNS
        shift = gl.zeros((COLUMNS,), gl.float32, layout=gl.SliceLayout(0, layout))
        if bias is not None:
            shift += gl.load(bias + column + lane).to(gl.float32)
        place = y + (row + line).to(gl.int64)[:, None] * (BLOCKS * F) + (column + lane)[None, :]
        mbarrier.wait(full, phase)
        for chunk in range(ROWS // CHUNK):
            values = (chunks[0].index(chunk).load(layout).to(gl.float32) + shift[None, :],)
            for block in gl.static_range(1, BLOCKS):
                values += (chunks[block].index(chunk).load(layout).to(gl.float32),)
            results = _gelu_of_octet(values, FAST)
            inside = (row + chunk * CHUNK + line < tokens)[:, None]
            for block in gl.static_range(BLOCKS):
                gl.store(place + block * F, results[block].to(y.dtype.element_ty), mask=inside)
            place += CHUNK * BLOCKS * F
        mbarrier.arrive(empty, count=1)
        phase ^= 1


@gluon.jit
def _allocate_box(dtype: gl.constexpr):
    """Shared memory for the eight blocks of a tile, each by itself: the compiler sees that they do not overlap."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([ROWS, COLUMNS], dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    blocks = ()
    for _ in gl.static_range(BLOCKS):
        blocks += (gl.allocate_shared_memory(dtype, [ROWS, COLUMNS], layout),)
    full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=1)
    return blocks, full, empty


@gluon.jit(do_not_specialize=["count", "tiles"])
def _linear_gelu(x, one, two, bias, y, count, tiles, F: gl.constexpr):
    """y of x, which have so many tokens; F is an eighth of the width of y."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = gl.allocate_shared_memory(x.dtype, [BLOCKS * M // STEP, ROWS, STEP], x.layout)
    ring = gl.allocate_shared_memory(x.dtype, [2 * STAGES, COLUMNS, STEP], one.layout)
    tokens_full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    tokens_empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    mbarrier.init(tokens_full, count=1)
    mbarrier.init(tokens_empty, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    boxes = (_allocate_box(x.dtype), _allocate_box(x.dtype))
    tokens, weights = (buffers, tokens_full, tokens_empty), (ring, full, empty)
    gl.warp_specialize(
        [
            (_multiply, (tokens, weights, boxes, tiles, F)),
            (_activate, (y, bias, boxes[0], count, tiles, 0, F)),
            (_activate, (y, bias, boxes[1], count, tiles, 1, F)),
            (_load_weights, (one, two, weights, tiles, F)),
            (_load_tokens, (x, tokens, tiles, F)),
        ],
        [4, 4, 1, 1],
        [_SOME, _SOME, _FEW, _FEW],
    )


@cache
def takes(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    """Whether there is a kernel from C channels to a width: in 16 bits, from 1024."""
    needed = 2 * (64 * CHANNELS + 8 * 32 * 64 + 2 * 64 * 256) + 1024
    fits = channels == CHANNELS and width % 256 == 0 and shared_memory(device) >= needed
    return fits and dtype.itemsize == 2


def linear_gelu(
    x: torch.Tensor, one: torch.Tensor, two: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> None:
    """GELU(W x + b) of x[T, C] written to out[T, 8F], which is contiguous; one[4, F, C/8], two[1, 2F, C/4]."""
    if not len(x):
        return
    f = out.shape[1] // 8
    tiles = -(-len(x) // 64) * (f // 32)
    with torch.cuda.device_of(x):
        _linear_gelu[(min(tiles, multiprocessors(x.device)),)](
            _boxes(x, (64, 64)),
            _boxes(one.flatten(0, 1), (32, 64)),
            _boxes(two.flatten(0, 1), (32, 64)),
            bias,
            out,
            len(x),
            tiles,
            F=f,
            num_warps=4,
            # What is left of a multiprocessor's registers for 16 warps.
            maxnreg=128,
        )
