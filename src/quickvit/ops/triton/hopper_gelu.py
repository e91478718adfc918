"""A linear map from 1024 or 1280 channels and GELU in one kernel, on NVIDIA's Hopper.

    y = Qᵀ GELU(Q (s W x + b e_A1))        s = 1, or what a norm multiplies a token by

GELU mixes entry i of each of the eight blocks of a hidden feature, so a tile of the result is the same 32 columns of
all of them, see `streamed.py`. Four warps multiply and leave a tile in shared memory, sixteen others apply GELU and
store the result while the products of the next one go on. Two more warps load. GELU's arithmetic takes as long as the
products, which is why it has warps of its own; they also find what a norm multiplies tokens by.
"""

import math
from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from quickvit.ops.triton.boxes import in_boxes, view_as
from quickvit.ops.triton.gelu import gelu_of, to_isotypic, to_regular
from quickvit.ops.triton.launch import multiprocessors, shared_memory
from quickvit.ops.triton.streamed import (
    copies_of,
    deviations,
    load_part,
    load_tokens,
    new_tokens,
    new_weights,
    ones,
    share,
    twos,
)

# By the number of channels: those of a box.
STEPS: dict[int, int] = {1024: 64, 1280: 32}
ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(32)
BLOCKS = gl.constexpr(8)
# Turns of weights in shared memory, and rows of a tile that GELU is applied to at a time.
STAGES = gl.constexpr(4)
CHUNK = gl.constexpr(32)
# Warps that apply GELU, registers of a thread of these, and of one that loads.
WARPS = gl.constexpr(16)
_SOME, _FEW = gl.constexpr(64), gl.constexpr(24)

# Φ(z) ≈ σ(p(z)) = (1 + tanh(p(z) / 2)) / 2 with an odd polynomial p of degree 3, found like that of `gelu.py`. Its
# error of GELU is 2.7e-4, that of the hardware's tanh 2.4e-4 z; the rounding of bfloat16 is up to 2e-3 z.
LOGIT = (1.6003141368961904, 6.940179590438844e-2)
_S = math.sqrt(2) / 4
_P0, _P1 = (gl.constexpr(p * _S ** (2 * k + 1) / 2) for k, p in enumerate(LOGIT))


@gluon.jit
def _load_weights(one, two, weights, tiles, F: gl.constexpr, M: gl.constexpr):
    """The weights of one tile after the other."""
    STEP: gl.constexpr = weights[0].shape[2]
    first, last = share(tiles)
    turn = 0
    for tile in range(first, last):
        column = tile % (F // COLUMNS) * COLUMNS
        for inner in range(0, M, STEP):
            for irrep in gl.static_range(4):
                load_part(one, [irrep * F + column, inner], weights, turn, irrep)
            turn += 1
        for inner in range(0, 2 * M, 2 * STEP):
            for part in gl.static_range(4):
                corner = [part % 2 * F + column, inner + part // 2 * STEP]
                load_part(two, corner, weights, turn, part)
            turn += 1


@gluon.jit
def _multiply(tokens, weights, box, tiles, F: gl.constexpr, M: gl.constexpr):
    """The products of one tile after the other, each left in the box for GELU."""
    x, tokens_full, tokens_empty = tokens
    TILES: gl.constexpr = F // COLUMNS
    PIECES: gl.constexpr = M // x.shape[2]
    first, last = share(tiles)
    turn = 0
    phase = 0
    times = 0
    for block in range(first // TILES, (last + TILES - 1) // TILES):
        mbarrier.wait(tokens_full, phase)
        end = min(last, (block + 1) * TILES)
        for tile in range(max(first, block * TILES), end):
            a1, a2, b1, b2 = ones(x, weights, turn)
            e1, e2 = twos(x, weights, turn + PIECES)
            turn += 2 * PIECES
            # While the last products of E go on, the others leave.
            a1, a2, b1, b2 = warpgroup_mma_wait(4, deps=(a1, a2, b1, b2))
            _leave_ones(box, times, a1, a2, b1, b2)
            e1, e2 = warpgroup_mma_wait(0, deps=(e1, e2))
            mbarrier.arrive(weights[2].index((turn - 1) % STAGES), count=1)
            mbarrier.arrive(tokens_empty, count=1, pred=tile + 1 >= end)
            _leave_twos(box, e1, e2)
            times ^= 1
        phase ^= 1


@gluon.jit
def _leave_ones(box, times, a1, a2, b1, b2):
    """Leave blocks of a tile, once the one before was read."""
    blocks, _, empty = box
    mbarrier.wait(empty, times ^ 1)
    blocks[0].store(a1.to(blocks[0].dtype))
    blocks[1].store(a2.to(blocks[0].dtype))
    blocks[2].store(b1.to(blocks[0].dtype))
    blocks[3].store(b2.to(blocks[0].dtype))


@gluon.jit
def _leave_twos(box, e1, e2):
    """Leave the rest of a tile, and say that it is full."""
    blocks, full, _ = box
    e11, e21 = copies_of(e1)
    e12, e22 = copies_of(e2)
    blocks[4].store(e11.to(blocks[0].dtype))
    blocks[5].store(e21.to(blocks[0].dtype))
    blocks[6].store(e12.to(blocks[0].dtype))
    blocks[7].store(e22.to(blocks[0].dtype))
    mbarrier.arrive(full, count=1)


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
def _activate(
    y,
    bias,
    tokens,
    box,
    count,
    tiles,
    EPS: gl.constexpr,
    PAIR_WEIGHT: gl.constexpr,
    F: gl.constexpr,
):
    """GELU of one tile after the other, some rows after the others, stored to y, which has so many tokens."""
    TILES: gl.constexpr = F // COLUMNS
    FAST: gl.constexpr = y.dtype.element_ty == gl.bfloat16
    blocks, full, empty = box
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [2, 16], [WARPS, 1], [1, 0])
    lane = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    line = gl.arange(0, CHUNK, layout=gl.SliceLayout(1, layout))
    chunks = ()
    for block in gl.static_range(BLOCKS):
        memory = blocks[block]
        chunks += (view_as(memory, memory.dtype, [ROWS // CHUNK, CHUNK, COLUMNS], memory.layout),)
    first, last = share(tiles)
    phase = 0
    one = gl.full((CHUNK,), 1.0, gl.float32, layout=gl.SliceLayout(1, layout))
    factors = (one, one, 0)
    for tile in range(first, last):
        if EPS is not None:
            begins = (tile == first) | (tile % TILES == 0)
            factors = _factors(tokens, begins, factors, EPS, PAIR_WEIGHT, gl.SliceLayout(1, layout))
        row = tile // TILES * ROWS
        column = tile % TILES * COLUMNS
        shift = gl.zeros((COLUMNS,), gl.float32, layout=gl.SliceLayout(0, layout))
        if bias is not None:
            shift += gl.load(bias + column + lane).to(gl.float32)
        place = y + (row + line).to(gl.int64)[:, None] * (BLOCKS * F) + (column + lane)[None, :]
        mbarrier.wait(full, phase)
        for chunk in range(ROWS // CHUNK):
            if EPS is not None:
                factor = gl.where(chunk == 0, factors[0], factors[1])
            values = ()
            for block in gl.static_range(BLOCKS):
                value = chunks[block].index(chunk).load(layout).to(gl.float32)
                if EPS is not None:
                    value *= factor[:, None]
                if block == 0:
                    value += shift[None, :]
                values += (value,)
            results = _gelu_of_octet(values, FAST)
            inside = (row + chunk * CHUNK + line < count)[:, None]
            for block in gl.static_range(BLOCKS):
                gl.store(place + block * F, results[block].to(y.dtype.element_ty), mask=inside)
            place += CHUNK * BLOCKS * F
        mbarrier.arrive(empty, count=1)
        phase ^= 1


@gluon.jit
def _factors(tokens, begins, before, EPS: gl.constexpr, PAIR_WEIGHT: gl.constexpr, LAYOUT: gl.constexpr):
    """What a norm multiplies the first rows of a block of tokens by, and the others, and the phase of the next block.

    They are those from before until another block begins.
    """
    x, full, empty = tokens
    upper, lower, phase = before
    if begins:
        # A warp reads four tokens at a time, and what is split has to be in one thread.
        reader: gl.constexpr = gl.BlockedLayout([1, x.shape[2] // 8], [4, 8], [WARPS, 1], [1, 0])
        both: gl.constexpr = gl.BlockedLayout([1, 2], [32, 1], [WARPS, 1], [1, 0])
        mbarrier.wait(full, phase)
        rstd = deviations(x, EPS, PAIR_WEIGHT, reader)
        mbarrier.arrive(empty, count=1)
        one, other = gl.split(gl.convert_layout(rstd.reshape([2, CHUNK]).permute([1, 0]), both))
        upper = gl.convert_layout(one, LAYOUT)
        lower = gl.convert_layout(other, LAYOUT)
        phase ^= 1
    return upper, lower, phase


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
def _linear_gelu(
    x,
    one,
    two,
    bias,
    y,
    count,
    tiles,
    EPS: gl.constexpr,
    PAIR_WEIGHT: gl.constexpr,
    F: gl.constexpr,
    M: gl.constexpr,
):
    """y of x, which have so many tokens; F and M are eighths of their widths. EPS is None where there is no norm."""
    tokens = new_tokens(x, BLOCKS * M, 1 if EPS is None else 2)
    weights = new_weights(x.dtype, COLUMNS, x.block_type.shape[1], STAGES)
    box = _allocate_box(x.dtype)
    gl.warp_specialize(
        [
            (_multiply, (tokens, weights, box, tiles, F, M)),
            (_activate, (y, bias, tokens, box, count, tiles, EPS, PAIR_WEIGHT, F)),
            (_load_weights, (one, two, weights, tiles, F, M)),
            (load_tokens, (x, tokens, tiles, F // COLUMNS)),
        ],
        [WARPS, 1, 1],
        [_SOME, _FEW, _FEW],
    )


@cache
def takes(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    """Whether there is a kernel from C channels to a width: in 16 bits, from 1024 or 1280."""
    if channels not in STEPS or width % 256 or dtype.itemsize != 2:
        return False
    needed = 2 * (64 * channels + 4 * 128 * STEPS[channels] + 64 * 256) + 1024
    return shared_memory(device) >= needed


def linear_gelu(
    x: torch.Tensor,
    one: torch.Tensor,
    two: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    norm: tuple[float, float] | None = None,
) -> None:
    """GELU(s W x + b) of x[T, C] written to out[T, 8F], which is contiguous; one[4, F, C/8], two[1, 2F, C/4].

    s is what a norm with this ε and weight of E multiplies a token by, or 1.
    """
    if not len(x):
        return
    channels = x.shape[1]
    f, step = out.shape[1] // 8, STEPS[channels]
    tiles = -(-len(x) // 64) * (f // 32)
    eps, pair_weight = norm or (None, 1.0)
    with torch.cuda.device_of(x):
        _linear_gelu[(min(tiles, multiprocessors(x.device)),)](
            in_boxes(x, (64, step)),
            in_boxes(one.flatten(0, 1), (32, step)),
            in_boxes(two.flatten(0, 1), (32, step)),
            bias,
            out,
            len(x),
            tiles,
            EPS=eps,
            PAIR_WEIGHT=pair_weight,
            F=f,
            M=channels // 8,
            num_warps=4,
            # What is left of a multiprocessor's registers for 24 warps.
            maxnreg=80,
        )
