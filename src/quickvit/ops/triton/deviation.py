"""What a layer norm divides a token by, without the norm: one pass that writes a number for a token."""

import torch
import triton
import triton.language as tl

from quickvit.ops.triton.launch import multiprocessors, traced
from quickvit.ops.triton.norm import FORWARD_TILES, norm_tile
from quickvit.ops.triton.token_tiles import (
    is_invariant,
    load_invariant,
    load_tiles,
    normalise,
    parts_of,
    store,
    token_tiles,
)


@triton.jit(do_not_specialize=["T"])
def _deviation(
    x,
    bias,
    rstd,
    T,
    EPS: tl.constexpr,
    PAIR_WEIGHT: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """x ← x + bias e_A1, and the reciprocal standard deviation of that."""
    tiles = token_tiles(M, BLOCK, REST)
    if bias is not None:
        biases = load_invariant(bias, tiles)
    for index in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(index, tl.int64)
        start = token * (8 * M)
        stream = load_tiles(x + start, tiles, 0)
        if bias is not None:
            before, stream = stream, ()
            for t in tl.static_range(len(tiles)):
                if t % 2 == 0:
                    stream += ((before[t].to(tl.float32) + biases[t // 2]).to(x.dtype.element_ty),)
                else:
                    stream += (before[t],)
        _, _, _, of_token = normalise(stream, tiles, EPS, PAIR_WEIGHT, M)
        # After the sums all threads have read what they share.
        if bias is not None:
            for t in tl.static_range(0, len(tiles), 2):
                store(x + start, tiles[t][0], stream[t], is_invariant(tiles[t]))
        tl.store(rstd + token, of_token)


def deviation(
    x: torch.Tensor, bias: torch.Tensor | None, eps: float, pair_weight: float = 1.0
) -> torch.Tensor:
    """1/σ[T] of a norm of x[T, C], which is contiguous, and to which a bias is added."""
    tokens, channels = x.shape
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        block, rest = parts_of(channels // 8)
        warps, per_multiprocessor, stages = norm_tile("norm forward", FORWARD_TILES, x)
        with torch.cuda.device_of(x):
            traced(_deviation)[(min(tokens, per_multiprocessor * multiprocessors(x.device)),)](
                x,
                bias,
                rstd,
                tokens,
                EPS=eps,
                PAIR_WEIGHT=pair_weight,
                M=channels // 8,
                BLOCK=block,
                REST=rest,
                STAGES=stages,
                num_warps=warps,
            )
    return rstd
