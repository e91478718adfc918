"""Products of 64 tokens, all of whose channels are in shared memory, with weights that stream past them, on Hopper.

A tile of the result is 64 tokens by as many columns of each of the eight blocks. The weights of a tile come in turns
of four boxes [columns, channels]: first those of A1 A2 B1 B2 for the same channels, then those of both copies of E
for twice as many, which the components of E share.

A program's share is a range of tiles, one block of tokens after the other. Buffers are handed over by barriers:
`full` says that one was filled, `empty` that it may be filled again.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quickvit.ops.triton.boxes import accumulators, load_box, view_as

_ROWS = gl.constexpr(64)


@gluon.jit
def share(tiles):
    """The first of this program's tiles, and the first that is no longer one."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return tiles * program // programs, tiles * (program + 1) // programs


@gluon.jit
def new_tokens(x, CHANNELS: gl.constexpr, READERS: gl.constexpr):
    """Shared memory for all channels of a block of tokens, which so many groups of warps read, and its barriers."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    step: gl.constexpr = x.block_type.shape[1]
    buffers = gl.allocate_shared_memory(x.dtype, [CHANNELS // step, _ROWS, step], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [1], barrier)
    mbarrier.init(full, count=1)
    mbarrier.init(empty, count=READERS)
    return buffers, full, empty


@gluon.jit
def new_weights(dtype: gl.constexpr, COLUMNS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory for some turns of weights, and its barriers."""
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([COLUMNS, STEP], dtype)
    ring = gl.allocate_shared_memory(dtype, [4 * STAGES, COLUMNS, STEP], layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=1)
        mbarrier.init(empty.index(stage), count=1)
    return ring, full, empty


@gluon.jit
def load_tokens(x, tokens, tiles, TILES: gl.constexpr):
    """One block of tokens after the other, each of which so many tiles need."""
    buffers, full, empty = tokens
    PIECES: gl.constexpr = buffers.shape[0]
    STEP: gl.constexpr = buffers.shape[2]
    first, last = share(tiles)
    phase = 0
    for block in range(first // TILES, (last + TILES - 1) // TILES):
        mbarrier.wait(empty, phase ^ 1)
        mbarrier.expect(full, PIECES * _ROWS * STEP * 2)
        for piece in gl.static_range(PIECES):
            load_box(x, [block * _ROWS, piece * STEP], full, buffers.index(piece))
        phase ^= 1


@gluon.jit
def deviations(x, EPS: gl.constexpr, PAIR_WEIGHT: gl.constexpr, LAYOUT: gl.constexpr):
    """What a norm multiplies tokens by: 1/σ around the means of their blocks. LAYOUT says who reads what."""
    PIECES: gl.constexpr = x.shape[0] // 8
    STEP: gl.constexpr = x.shape[2]
    variance = gl.zeros((_ROWS,), gl.float32, layout=gl.SliceLayout(1, LAYOUT))
    # A1 A2 B1 B2, and the components of E, which have two copies. In a loop: unrolled it would be most of the kernel.
    for irrep in range(6):
        copies = 1 + irrep // 4
        first = PIECES * (irrep + irrep // 5)
        values = gl.zeros((_ROWS, STEP), gl.float32, layout=LAYOUT)
        squares = values
        for piece in range(first, first + copies * PIECES):
            value = x.index(piece).load(LAYOUT).to(gl.float32)
            values = values + value
            squares = gl.fma(value, value, squares)
        total = gl.sum(values, axis=1)
        around = gl.sum(squares, axis=1) - total * total * gl.where(
            copies == 1, 1 / (PIECES * STEP), 1 / (2 * PIECES * STEP)
        )
        # Of equal entries rounding may leave less than nothing; what is no number stays none.
        variance += gl.where(around < 0.0, 0.0, around) * gl.where(copies == 1, 1.0, PAIR_WEIGHT)
    rstd = gl.rsqrt(variance * (1 / (8 * PIECES * STEP)) + EPS)
    return gl.where(variance < float("inf"), rstd, float("nan"))


@gluon.jit
def load_part(boxes, corner, weights, turn, PART: gl.constexpr):
    """One of the four boxes of a turn."""
    ring, full, empty = weights
    STAGES: gl.constexpr = ring.shape[0] // 4
    stage = turn % STAGES
    ready = full.index(stage)
    if PART == 0:
        mbarrier.wait(empty.index(stage), (turn // STAGES & 1) ^ 1)
        mbarrier.expect(ready, 4 * ring.shape[1] * ring.shape[2] * 2)
    buffer = ring.index(4 * stage + PART)
    load_box(boxes, corner, ready, view_as(buffer, buffer.dtype, boxes.block_type.shape, boxes.layout))


@gluon.jit
def ones(x, weights, turn):
    """The products of A1 A2 B1 B2 over all turns; the last of them go on.

    Those of a turn begin before those of the last one have ended, whose weights then go.
    """
    ring, full, empty = weights
    STAGES: gl.constexpr = ring.shape[0] // 4
    COLUMNS: gl.constexpr = ring.shape[1]
    PIECES: gl.constexpr = x.shape[0] // 8
    a1 = gl.zeros((_ROWS, COLUMNS), gl.float32, layout=accumulators(COLUMNS))
    a2, b1, b2 = a1, a1, a1
    for piece in range(PIECES):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        more = piece > 0
        a1 = _begin(x.index(piece), ring.index(4 * stage), a1, more)
        a2 = _begin(x.index(PIECES + piece), ring.index(4 * stage + 1), a2, more)
        b1 = _begin(x.index(2 * PIECES + piece), ring.index(4 * stage + 2), b1, more)
        b2 = _begin(x.index(3 * PIECES + piece), ring.index(4 * stage + 3), b2, more)
        a1, a2, b1, b2 = warpgroup_mma_wait(4, deps=(a1, a2, b1, b2))
        mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1, pred=more)
        turn += 1
    return a1, a2, b1, b2


@gluon.jit
def twos(x, weights, turn):
    """The products of both components of E with both copies; the last of them go on."""
    ring, full, empty = weights
    STAGES: gl.constexpr = ring.shape[0] // 4
    COLUMNS: gl.constexpr = 2 * ring.shape[1]
    PIECES: gl.constexpr = x.shape[0] // 8
    copies = view_as(ring, ring.dtype, [2 * STAGES, COLUMNS, ring.shape[2]], ring.layout)
    e1 = gl.zeros((_ROWS, COLUMNS), gl.float32, layout=accumulators(COLUMNS))
    e2 = e1
    for piece in range(PIECES):
        stage = turn % STAGES
        mbarrier.wait(full.index(stage), turn // STAGES & 1)
        for half in gl.static_range(2):
            left = 4 * PIECES + 2 * piece + half
            right = copies.index(2 * stage + half)
            e1 = _begin(x.index(left), right, e1, piece + half > 0)
            e2 = _begin(x.index(left + 2 * PIECES), right, e2, piece + half > 0)
        e1, e2 = warpgroup_mma_wait(4, deps=(e1, e2))
        mbarrier.arrive(empty.index((turn - 1) % STAGES), count=1)
        turn += 1
    return e1, e2


@gluon.jit
def _begin(left, right, total, more):
    return warpgroup_mma(left, right.permute((1, 0)), total, use_acc=more, is_async=True)


@gluon.jit
def copies_of(value):
    """Both copies of a component of E."""
    COLUMNS: gl.constexpr = value.shape[1] // 2
    layout: gl.constexpr = accumulators(COLUMNS)
    one, other = gl.split(value.reshape([_ROWS, 2, COLUMNS]).permute([0, 2, 1]))
    return gl.convert_layout(one, layout), gl.convert_layout(other, layout)
