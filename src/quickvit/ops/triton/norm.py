"""Octic layer norm on packed channels, alone and fused with the residual addition before it.

    y = gain · x̂ + shift e_A1,    x̂ = (x - x̄) / √(mean of (x - x̄)² + ε)

x̄ is the mean over each irrep component, the mean of squares that over all C channels; there the
components of E may be weighed by a factor other than 1. A token is held as tiles, see `token_tiles`. With m = C/8,
gain and layer scale have 6m entries, shift and bias m (A1 only).

A branch may be of some tokens only, and the norm of some be asked for only: added[T] and normed[T] then say which row
of the branch, and of y, belongs to a token, or -1.
For the backward pass seven statistics per token are kept: the six means and the reciprocal standard
deviation.
"""

import torch
import triton
import triton.language as tl

from quickvit.ops.tiles import tile
from quickvit.ops.triton.launch import multiprocessors, traced
from quickvit.ops.triton.token_tiles import (
    is_invariant,
    load_invariant,
    load_tiles,
    normalise,
    of_row,
    parts_of,
    row_of,
    store,
    store_gains,
    store_tiles,
    token_tiles,
    zeros,
)

# Warps per program, programs per multiprocessor, stages of the pipeline of loads: a program takes one token
# after the other. Keyed by the padded width of a token; the first key that is large enough holds.
FORWARD_TILES: dict[int, tuple[int, int, int]] = {
    512: (1, 16, 2),
    1024: (2, 10, 3),
    1536: (1, 8, 3),
    2048: (4, 4, 3),
    4096: (8, 2, 3),
    6144: (4, 4, 3),
    8192: (16, 1, 3),
    16384: (16, 1, 1),
}
BACKWARD_TILES: dict[int, tuple[int, int, int]] = {
    256: (1, 16, 2),
    512: (2, 8, 2),
    1536: (2, 4, 3),
    2048: (4, 4, 3),
    4096: (16, 1, 3),
    8192: (16, 1, 2),
    16384: (16, 1, 1),
}
# Exceptions for streams in single precision, as autocast has them, of just these widths: registers are scarcer.
WIDE_BACKWARD_TILES: dict[int, tuple[int, int, int]] = {
    1024: (4, 2, 3),
    1280: (2, 2, 3),
    2048: (4, 2, 3),
}
# Rows and columns per step, warps: the sum over programs of the partial parameter gradients.
REDUCTION_TILE: tuple[int, int, int] = (512, 8, 4)

STATISTICS = 7
_STATISTICS = tl.constexpr(STATISTICS)


@triton.jit
def _factor(row_scale, rows, row, tokens_per_row):
    """What a row of the branch is multiplied by: 0 where a token has none."""
    if rows is None:
        return tl.load(row_scale + row // tokens_per_row)
    else:
        return tl.where(row < 0, 0.0, tl.load(row_scale + tl.maximum(row, 0) // tokens_per_row))


@triton.jit(do_not_specialize=["T", "tokens_per_row"])
def _norm_forward(
    x,
    branch,
    branch_bias,
    scale,
    row_scale,
    added,
    normed,
    gain,
    shift,
    residual,
    y,
    statistics,
    T,
    tokens_per_row,
    EPS: tl.constexpr,
    PAIR_WEIGHT: tl.constexpr,
    M: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
    IN_PLACE: tl.constexpr,
):
    """y = norm(s) with s = x, or s = x + row_scale · scale · (branch + bias e_A1) where there is a branch."""
    tiles = token_tiles(M, BLOCK, REST)
    gains = load_tiles(gain, tiles, 1)
    shifts = load_invariant(shift, tiles)
    if scale is not None:
        scales = load_tiles(scale, tiles, 1)
    if branch_bias is not None:
        biases = load_invariant(branch_bias, tiles)

    for index in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(index, tl.int64)
        start = token * (8 * M)
        stream = load_tiles(x + start, tiles, 0)
        if branch is not None:
            row = row_of(added, token)
            branches = load_tiles(branch + row * (8 * M), of_row(added, row, tiles), 0)
            if row_scale is not None:
                factor = _factor(row_scale, added, row, tokens_per_row)
            before, stream = stream, ()
            for t in tl.static_range(len(tiles)):
                more = branches[t].to(tl.float32)
                if branch_bias is not None and t % 2 == 0:
                    more += biases[t // 2]
                if scale is not None:
                    more *= scales[t].to(tl.float32)
                if row_scale is not None:
                    more *= factor
                # The norm sees what the next block will see, the rounded sum.
                stream += ((before[t].to(tl.float32) + more).to(residual.dtype.element_ty),)
            if not IN_PLACE:
                store_tiles(residual + start, tiles, stream)

        line_mean, plane_mean, centred, rstd = normalise(stream, tiles, EPS, PAIR_WEIGHT, M)
        ys = ()
        for t in tl.static_range(len(tiles)):
            z = centred[t] * rstd * gains[t].to(tl.float32)
            if t % 2 == 0:
                z += shifts[t // 2]
            ys += (z,)
        # The sum may take the place of x, and y that of the branch: not before all threads, of which several may have
        # the same entries, have read them.
        if IN_PLACE:
            store_tiles(residual + start, tiles, stream)
        row = row_of(normed, token)
        store_tiles(y + row * (8 * M), of_row(normed, row, tiles), ys)

        saved = statistics + token * _STATISTICS
        tl.store(saved + tl.arange(0, 4), line_mean)
        tl.store(saved + 4 + tl.arange(0, 2), plane_mean)
        tl.store(saved + 6, rstd)


@triton.jit
def _add_pairs(a, b, more_a, more_b):
    return a + more_a, b + more_b


@triton.jit(do_not_specialize=["T", "tokens_per_row"])
def _norm_backward(
    dy,
    dstream,
    residual,
    statistics,
    gain,
    branch,
    branch_bias,
    scale,
    row_scale,
    added,
    normed,
    dx,
    dbranch,
    partial,
    T,
    tokens_per_row,
    PAIR_WEIGHT: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of `_norm_forward`; that of the sum arrives as dy through the norm and as dstream past it.

        dx = rstd (w - w̄ - weight · x̂ · mean of w x̂) + dstream,    w = gain · dy
        dbranch = row_scale · scale · dx

    Sums over this program's tokens go to its line of partial[programs, WIDTH], in the order of the 6 M gains,
    M shifts, 6 M scales and M biases: dgain = Σ dy x̂, dshift = Σ dy, dscale = Σ row_scale dx (branch + bias),
    dbias = Σ dbranch.
    """
    tiles = token_tiles(M, BLOCK, REST)
    lines = tiles[::2]
    gains = load_tiles(gain, tiles, 1)
    dgains = zeros(tiles)
    dshifts = zeros(lines)
    dscales = zeros(tiles)
    dbiases = zeros(lines)
    if scale is not None:
        scales = load_tiles(scale, tiles, 1)
    if branch_bias is not None:
        biases = load_invariant(branch_bias, tiles)

    for index in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(index, tl.int64)
        start = token * (8 * M)
        # Every load of a step comes before its sums, so that they are all under way at once.
        row = row_of(normed, token)
        dys = load_tiles(dy + row * (8 * M), of_row(normed, row, tiles), 0)
        xs = load_tiles(residual + start, of_row(normed, row, tiles), 0)
        if dstream is not None:
            dstreams = load_tiles(dstream + start, tiles, 0)
        branch_row = row_of(added, token)
        if scale is not None:
            branches = load_tiles(branch + branch_row * (8 * M), of_row(added, branch_row, tiles), 0)
        if row_scale is not None:
            factor = _factor(row_scale, added, branch_row, tokens_per_row)
        saved = statistics + token * _STATISTICS
        a1, a2, b1, b2 = tl.load(saved), tl.load(saved + 1), tl.load(saved + 2), tl.load(saved + 3)
        e1, e2, rstd = tl.load(saved + 4), tl.load(saved + 5), tl.load(saved + 6)

        unit = ()
        weighted = ()
        line_sums = tl.zeros([4, 2], tl.float32)
        plane_sums = tl.zeros([2, 2], tl.float32)
        before, dgains = dgains, ()
        shifts, dshifts = dshifts, ()
        for t in tl.static_range(len(tiles)):
            row = tiles[t][3]
            g = dys[t].to(tl.float32)
            if t % 2 == 0:
                mean = tl.where(row < 2, tl.where(row == 0, a1, a2), tl.where(row == 2, b1, b2))
                dshifts += (shifts[t // 2] + g,)
            else:
                mean = tl.where(row == 0, e1, e2)
            x = (xs[t].to(tl.float32) - mean) * rstd
            dgains += (before[t] + g * x,)
            w = g * gains[t].to(tl.float32)
            sums, products = tl.reduce((w, w * x), 1, _add_pairs)
            # Joined, since tiles of two sizes lie in different threads, and each move between them is a barrier.
            if t % 2 == 0:
                line_sums += tl.join(sums, products)
            else:
                plane_sums += tl.join(sums, products)
            unit += (x,)
            weighted += (w,)
        line_mean, line_along = tl.split(line_sums)
        plane_mean, plane_along = tl.split(plane_sums)
        line_mean *= 1.0 / M
        plane_mean *= 0.5 / M
        along = (tl.sum(line_along, axis=0) + tl.sum(plane_along, axis=0)) * (0.125 / M)

        scale_sums, dscales = dscales, ()
        bias_sums, dbiases = dbiases, ()
        dxs = ()
        dbranches = ()
        for t in tl.static_range(len(tiles)):
            if t % 2 == 0:
                d = rstd * (weighted[t] - line_mean[:, None] - along * unit[t])
            else:
                d = rstd * (weighted[t] - plane_mean[:, None] - along * PAIR_WEIGHT * unit[t])
            if dstream is not None:
                d += dstreams[t].to(tl.float32)
            dxs += (d,)
            if row_scale is not None:
                d *= factor
            if scale is not None:
                more = branches[t].to(tl.float32)
                if branch_bias is not None and t % 2 == 0:
                    more += biases[t // 2]
                dscales += (scale_sums[t] + d * more,)
                d *= scales[t].to(tl.float32)
            else:
                dscales += (scale_sums[t],)
            if t % 2 == 0:
                dbiases += (bias_sums[t // 2] + d,)
            dbranches += (d,)
        store_tiles(dx + start, tiles, dxs)
        if dbranch is not None:
            store_tiles(dbranch + branch_row * (8 * M), of_row(added, branch_row, tiles), dbranches)

    line = partial + tl.program_id(0).to(tl.int64) * WIDTH
    store_gains(line, tiles, dgains)
    for t in tl.static_range(len(lines)):
        tl.store(line + 6 * M + lines[t][0], dshifts[t], mask=is_invariant(lines[t]))
    if scale is not None:
        store_gains(line + 7 * M, tiles, dscales)
    if branch_bias is not None:
        for t in tl.static_range(len(lines)):
            tl.store(line + 13 * M + lines[t][0], dbiases[t], mask=is_invariant(lines[t]))


@triton.jit(do_not_specialize=["P"])
def _sum_partial(
    partial,
    dgain,
    dshift,
    dscale,
    dbias,
    P,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Column sums of partial[P, WIDTH], handed out to the parameters they belong to."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK_P, BLOCK], tl.float32)
    for first in range(0, P, BLOCK_P):
        line = first + tl.arange(0, BLOCK_P)
        mask = (line < P)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(partial + line[:, None] * WIDTH + column[None, :], mask=mask, other=0.0)
    total = tl.sum(total, axis=0)
    store(dgain, column, total, column < 6 * M)
    store(dshift, column - 6 * M, total, (column >= 6 * M) & (column < 7 * M))
    if dscale is not None:
        store(dscale, column - 7 * M, total, (column >= 7 * M) & (column < 13 * M))
    if dbias is not None:
        store(dbias, column - 13 * M, total, (column >= 13 * M) & (column < 14 * M))


def norm_tile(
    kernel: str,
    tiles: dict[int, tuple[int, int, int]],
    x: torch.Tensor,
    wide: dict[int, tuple[int, int, int]] | None = None,
) -> tuple[int, ...]:
    """What tuning found for tokens like those of x, else the entry of the table that they fit."""
    m = x.shape[1] // 8
    width = 8 * sum(parts_of(m))
    default = next((entry for limit, entry in tiles.items() if width <= limit), list(tiles.values())[-1])
    if wide is not None and x.element_size() == 4:
        default = wide.get(width, default)
    return tile(kernel, (m, x.element_size()), x.device, default)


def residual_norm_forward(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    tokens_per_row: int,
    gain: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    pair_weight: float = 1.0,
    *,
    added: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
    rows: int | None = None,
    into: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Residual addition and the octic layer norm after it, in one pass; without a branch the norm of x alone.

        residual = x + row_scale · scale · (branch + branch_bias e_A1),    y = norm(residual)

    x, branch[T, C], branch_bias[C/8], scale[3C/4] (layer scale), row_scale[T / tokens_per_row] in float32
    (stochastic depth). residual has the dtype of x, y the given dtype (default: that of branch); y is the norm
    of the residual as it was rounded. Returns residual, y, statistics[T, 7].

    added[T] are the rows of a branch[n, C] of some tokens, whose row_scale must be given; normed[T] those of
    y[rows, C]. Both results may be written `into` tensors, which may be x and branch.
    """
    tokens, channels = x.shape
    if into is None:
        residual = None if branch is None else torch.empty_like(x)
        dtype = dtype or (x if branch is None else branch).dtype
        y = x.new_empty(tokens if rows is None else rows, channels, dtype=dtype)
    else:
        residual, y = into
    statistics = torch.empty((tokens, STATISTICS), dtype=torch.float32, device=x.device)
    if tokens == 0:
        return residual, y, statistics
    block, rest = parts_of(channels // 8)
    warps, per_multiprocessor, stages = norm_tile("norm forward", FORWARD_TILES, x)
    programs = min(tokens, per_multiprocessor * multiprocessors(x.device))
    with torch.cuda.device_of(x):
        traced(_norm_forward)[(programs,)](
            x,
            branch,
            branch_bias,
            scale,
            row_scale,
            added,
            normed,
            gain,
            shift,
            residual,
            y,
            statistics,
            tokens,
            tokens_per_row,
            # As arguments the compiler would take them for double precision.
            EPS=eps,
            PAIR_WEIGHT=pair_weight,
            M=channels // 8,
            BLOCK=block,
            REST=rest,
            STAGES=stages,
            IN_PLACE=into is not None,
            num_warps=warps,
        )
    return residual, y, statistics


def residual_norm_backward(
    dy: torch.Tensor,
    dstream: torch.Tensor | None,
    residual: torch.Tensor,
    statistics: torch.Tensor,
    gain: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    tokens_per_row: int,
    pair_weight: float = 1.0,
    *,
    added: torch.Tensor | None = None,
    normed: torch.Tensor | None = None,
) -> tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None
]:
    """Gradients of `residual_norm_forward`: dx, dbranch, dgain, dshift, dscale, dbranch_bias.

    dx is the gradient of the residual and of x alike. dscale and dbranch_bias are None where there is no such
    parameter.
    """
    tokens, channels = residual.shape
    m = channels // 8
    dx = torch.empty_like(residual)
    dbranch = None if branch is None else torch.empty_like(branch)
    dgain = torch.empty_like(gain)
    dshift = torch.empty(m, dtype=gain.dtype, device=gain.device)
    dscale = None if scale is None else torch.empty_like(scale)
    dbias = None if branch_bias is None else torch.empty_like(branch_bias)
    if tokens == 0:
        for parameter in (dgain, dshift, dscale, dbias):
            if parameter is not None:
                parameter.zero_()
        return dx, dbranch, dgain, dshift, dscale, dbias

    block, rest = parts_of(m)
    warps, per_multiprocessor, stages = norm_tile(
        "norm backward", BACKWARD_TILES, residual, WIDE_BACKWARD_TILES
    )
    programs = min(tokens, per_multiprocessor * multiprocessors(residual.device))
    width = 7 * m if scale is None and branch_bias is None else 14 * m
    partial = torch.empty((programs, width), dtype=torch.float32, device=residual.device)
    rows, columns, reduction_warps = REDUCTION_TILE
    with torch.cuda.device_of(residual):
        traced(_norm_backward)[(programs,)](
            dy,
            dstream,
            residual,
            statistics,
            gain,
            branch,
            branch_bias,
            scale,
            row_scale,
            added,
            normed,
            dx,
            dbranch,
            partial,
            tokens,
            tokens_per_row,
            PAIR_WEIGHT=pair_weight,
            M=m,
            WIDTH=width,
            BLOCK=block,
            REST=rest,
            STAGES=stages,
            num_warps=warps,
        )
        traced(_sum_partial)[(triton.cdiv(width, columns),)](
            partial,
            dgain,
            dshift,
            dscale,
            dbias,
            programs,
            M=m,
            WIDTH=width,
            BLOCK_P=rows,
            BLOCK=columns,
            num_warps=reduction_warps,
        )
    return dx, dbranch, dgain, dshift, dscale, dbias
