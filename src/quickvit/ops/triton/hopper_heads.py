"""The linear map from 1280 channels to q, k and v of 16 heads, on NVIDIA's Hopper.

A tile of `streamed.py` is here two channels of all heads, in each of the eight blocks of q, k or v: of a token and a
head those are 32 bytes that lie side by side, since heads are written in pairs, see `heads.py`. Two groups of four
warps take tiles in turns: one multiplies while the other stores. Two more warps load.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma_wait

from quickvit.ops.triton.boxes import accumulators, in_boxes
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

HEADS = gl.constexpr(16)
CHANNELS = gl.constexpr(1280)
# Channels of a head in an irrep of one dimension.
_C = gl.constexpr(10)
ROWS = gl.constexpr(64)
COLUMNS = gl.constexpr(2 * 16)
# Channels of a box, and boxes of an irrep of one dimension.
STEP = gl.constexpr(32)
PIECES = gl.constexpr(5)
# Pairs of channels, and tiles of a block of tokens: those of q, then of k, then of v.
PAIRS = gl.constexpr(5)
TILES = gl.constexpr(3 * 5)
# Turns of weights in shared memory.
STAGES = gl.constexpr(8)
# Registers of a thread that loads, and of one that computes.
_FEW, _MANY = gl.constexpr(40), gl.constexpr(232)


@gluon.jit
def _load_weights(one, two, weights, tiles):
    """The weights of one tile after the other."""
    first, last = share(tiles)
    turn = 0
    for tile in range(first, last):
        feature = tile % TILES // PAIRS
        channel = tile % PAIRS * 2
        for piece in range(PIECES):
            for irrep in gl.static_range(4):
                corner = [(3 * irrep + feature) * HEADS, channel, piece * STEP]
                load_part(one, corner, weights, turn, irrep)
            turn += 1
        for piece in range(PIECES):
            for part in gl.static_range(4):
                corner = [feature * HEADS, part % 2 * _C + channel, (2 * piece + part // 2) * STEP]
                load_part(two, corner, weights, turn, part)
            turn += 1


@gluon.jit
def _multiply(
    out,
    bias,
    tokens,
    weights,
    following,
    count,
    tiles,
    EPS: gl.constexpr,
    PAIR_WEIGHT: gl.constexpr,
    GROUP: gl.constexpr,
):
    """Every other tile."""
    x, tokens_full, tokens_empty = tokens
    _, _, empty = weights
    lane = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, accumulators(COLUMNS)))
    first, last = share(tiles)
    phase = 0
    for block in range(first // TILES, (last + TILES - 1) // TILES):
        mbarrier.wait(tokens_full, phase)
        if EPS is not None:
            rstd = deviations(x, EPS, PAIR_WEIGHT, gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0]))
            # Of products of one irrep, and of both copies of another, which lie in threads in two ways.
            factor = gl.convert_layout(rstd, gl.SliceLayout(1, accumulators(COLUMNS)))[:, None]
            of_two = gl.convert_layout(rstd, gl.SliceLayout(1, accumulators(2 * COLUMNS)))[:, None]
        begin = max(first, block * TILES)
        for tile in range(begin + (begin - first + GROUP) % 2, min(last, (block + 1) * TILES), 2):
            turn = (tile - first) * (2 * PIECES)
            # The other group has seen all weights before come: a barrier knows of two phases only.
            mbarrier.wait(following.index(GROUP), (tile - first) // 2 & 1 ^ (1 - GROUP))
            a1, a2, b1, b2 = ones(x, weights, turn)
            e1, e2 = twos(x, weights, turn + PIECES)
            mbarrier.arrive(following.index(1 - GROUP), count=1)
            a1, a2, b1, b2, e1, e2 = warpgroup_mma_wait(0, deps=(a1, a2, b1, b2, e1, e2))
            mbarrier.arrive(empty.index((turn + 2 * PIECES - 1) % STAGES), count=1)
            feature = tile % TILES // PAIRS
            pair = tile % PAIRS
            if EPS is not None:
                a1, a2, b1, b2 = a1 * factor, a2 * factor, b1 * factor, b2 * factor
                e1, e2 = e1 * of_two, e2 * of_two
            if bias is not None:
                channel = (feature * HEADS + lane // 2) * _C + 2 * pair + lane % 2
                a1 += gl.load(bias + channel).to(gl.float32)[None, :]
            place = (gl.cast(feature, gl.int64) * count + block * ROWS) * CHANNELS + pair * 16
            _put(out + place, a1, a2, b1, b2, e1, e2, count - block * ROWS)
        mbarrier.arrive(tokens_empty, count=1)
        phase ^= 1


@gluon.constexpr_function
def _in_two_threads():
    """Where entries of a tile [64, 16 heads · 16] are: those of a head in two threads, which write them at once."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [0, 16], [0, 64], [0, 128], [8, 0]],
        lane_bases=[[0, 8], [0, 32], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )


@gluon.jit
def _put(out, a1, a2, b1, b2, e1, e2, rows):
    """Store a tile, which has so many rows that are tokens."""
    dtype: gl.constexpr = out.dtype.element_ty
    e11, e12 = copies_of(e1.to(dtype))
    e21, e22 = copies_of(e2.to(dtype))
    single = gl.join(gl.join(a1.to(dtype), a2.to(dtype)), gl.join(b1.to(dtype), b2.to(dtype)))
    double = gl.join(gl.join(e11, e12), gl.join(e21, e22))
    blocks = gl.join(single, double).reshape([ROWS, HEADS, 2, 2, 2, 2])
    layout: gl.constexpr = _in_two_threads()
    tile = gl.convert_layout(blocks.permute([0, 1, 3, 5, 4, 2]).reshape([ROWS, 16 * HEADS]), layout)
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    entry = gl.arange(0, 16 * HEADS, layout=gl.SliceLayout(0, layout))
    entry = gl.max_contiguous(gl.multiple_of(entry // 16 * (8 * _C) + entry % 16, 16), 16)
    gl.store(out + row[:, None] * CHANNELS + entry[None, :], tile, mask=(row < rows)[:, None])


@gluon.jit(do_not_specialize=["count", "tiles"])
def _linear_heads(x, one, two, bias, out, count, tiles, EPS: gl.constexpr, PAIR_WEIGHT: gl.constexpr):
    """q, k and v of so many tokens. EPS is None where there is no norm."""
    tokens = new_tokens(x, CHANNELS, 2)
    weights = new_weights(x.dtype, COLUMNS, STEP, STAGES)
    following = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for group in gl.static_range(2):
        mbarrier.init(following.index(group), count=1)
    gl.warp_specialize(
        [
            (_multiply, (out, bias, tokens, weights, following, count, tiles, EPS, PAIR_WEIGHT, 0)),
            (_multiply, (out, bias, tokens, weights, following, count, tiles, EPS, PAIR_WEIGHT, 1)),
            (_load_weights, (one, two, weights, tiles)),
            (load_tokens, (x, tokens, tiles, TILES)),
        ],
        [4, 1, 1],
        [_MANY, _FEW, _FEW],
    )


@cache
def takes(device: torch.device, dtype: torch.dtype, channels: int, heads: int) -> bool:
    """Whether the kernel is for so many channels and heads: in 16 bits, of 1280 and 16."""
    if (channels, heads, dtype.itemsize) != (CHANNELS.value, HEADS.value, 2):
        return False
    weights = STAGES.value * 4 * COLUMNS.value * STEP.value
    return shared_memory(device) >= 2 * (ROWS.value * channels + weights) + 1024


def linear_heads(
    x: torch.Tensor,
    one: torch.Tensor,
    two: torch.Tensor,
    bias: torch.Tensor | None,
    norm: tuple[float, float] | None = None,
) -> torch.Tensor:
    """q, k and v of x[T, C] in pairs, [3, T, H, D], with the bias of A1; one[4, 3C/8, C/8], two[1, 3C/4, C/4].

    Before the bias tokens are multiplied by what a norm with this ε and weight of E multiplies them by, or by 1.
    """
    count, channels = x.shape
    out = torch.empty((3, count, HEADS.value, channels // HEADS.value), dtype=x.dtype, device=x.device)
    tiles = -(-count // 64) * TILES.value
    eps, pair_weight = norm or (None, 1.0)
    if tiles:
        with torch.cuda.device_of(x):
            _linear_heads[(min(tiles, multiprocessors(x.device)),)](
                in_boxes(x, (64, STEP.value)),
                in_boxes(one.reshape(-1, _C.value, one.shape[2]), (16, 2, STEP.value)),
                in_boxes(two.reshape(-1, 2 * _C.value, two.shape[2]), (16, 2, STEP.value)),
                bias,
                out,
                count,
                tiles,
                EPS=eps,
                PAIR_WEIGHT=pair_weight,
                num_warps=4,
                # What is left of a multiprocessor's registers for 12 warps.
                maxnreg=168,
            )
    return out
