"""What a layer norm divides a token by, without the norm: one pass that writes a number for a token."""

import torch
import triton
import triton.language as tl

from quickvit.ops.triton.launch import multiprocessors, traced
from quickvit.ops.triton.norm import FORWARD_TILES, norm_tile
from quickvit.ops.triton.token_tiles import load_tiles, normalise, parts_of, token_tiles


@triton.jit(do_not_specialize=["T"])
def _deviation(
    x,
    rstd,
    T,
    EPS: tl.constexpr,
    PAIR_WEIGHT: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The reciprocal standard deviation of each token."""
    tiles = token_tiles(M, BLOCK, REST)
    for index in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(index, tl.int64)
        stream = load_tiles(x + token * (8 * M), tiles, 0)
        _, _, _, of_token = normalise(stream, tiles, EPS, PAIR_WEIGHT, M)
        tl.store(rstd + token, of_token)


def deviation(x: torch.Tensor, eps: float, pair_weight: float = 1.0) -> torch.Tensor:
    """1/σ[T] of a norm of x[T, C], which is contiguous."""
    tokens, channels = x.shape
    rstd = torch.empty(tokens, dtype=torch.float32, device=x.device)
    if tokens:
        block, rest = parts_of(channels // 8)
        warps, per_multiprocessor, stages = norm_tile("norm forward", FORWARD_TILES, x)
        with torch.cuda.device_of(x):
            traced(_deviation)[(min(tokens, per_multiprocessor * multiprocessors(x.device)),)](
                x,
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
