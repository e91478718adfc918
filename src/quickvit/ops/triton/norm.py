"""Octic layer norm on packed channels, alone and fused with the residual addition before it.

    y = gain · x̂ + shift e_A1,    x̂ = (x - x̄) / √(mean of (x - x̄)² + ε)

x̄ is the mean over each irrep component, the mean of squares that over all C channels; there the
components of E may be weighed by a factor other than 1. A feature x[T, C] has m = C/8: A1, A2, B1, B2 are
four blocks of m columns, the components of E two blocks of 2m, each with its own mean. A token is
therefore held as two tiles, u[4, m] and v[2, 2m], padded to powers of two: means are sums along rows, and
what the components of E share is a broadcast over the rows of v.

gain and layer scale have 6m entries (4m, then 2m for both components of E), shift and bias m (A1 only).
For the backward pass seven statistics per token are kept: the six means and the reciprocal standard
deviation.
"""

import functools

import torch
import triton
import triton.language as tl

from quickvit.ops.tiles import tile
from quickvit.ops.triton.launch import traced

# Warps per program, programs per multiprocessor, stages of the pipeline of loads: a program takes one token
# after the other. Keyed by the padded width of a token, 8 times the next power of two of m; the first key
# that is large enough holds.
FORWARD_TILES: dict[int, tuple[int, int, int]] = {
    512: (1, 16, 2),
    1024: (2, 10, 3),
    2048: (4, 4, 3),
    4096: (8, 2, 3),
    8192: (16, 1, 3),
    16384: (16, 1, 1),
}
BACKWARD_TILES: dict[int, tuple[int, int, int]] = {
    256: (1, 16, 2),
    512: (2, 8, 2),
    1024: (4, 4, 3),
    2048: (4, 4, 3),
    4096: (16, 1, 3),
    8192: (16, 1, 2),
    16384: (16, 1, 1),
}
# Rows and columns per step, warps: the sum over programs of the partial parameter gradients.
REDUCTION_TILE: tuple[int, int, int] = (256, 32, 8)

STATISTICS = 7
_STATISTICS = tl.constexpr(STATISTICS)


@triton.jit
def _lines(M: tl.constexpr, BLOCK_M: tl.constexpr):
    """Columns of the tile u of one-dimensional irreps, which of them exist, and which are A1."""
    row, column = tl.arange(0, 4)[:, None], tl.arange(0, BLOCK_M)[None, :]
    return row * M + column, column < M, (column < M) & (row == 0)


@triton.jit
def _planes(M: tl.constexpr, BLOCK_M: tl.constexpr):
    """Columns of the tile v of the components of E, their entries in a gain, and which of them exist."""
    row, column = tl.arange(0, 2)[:, None], tl.arange(0, 2 * BLOCK_M)[None, :]
    # Each component loads its own copy of a gain: to share one, it would have to pass through shared memory.
    return 4 * M + row * (2 * M) + column, 4 * M + row * 0 + column, column < 2 * M


@triton.jit
def _load(pointer, offset, mask):
    return tl.load(pointer + offset, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(pointer, offset, value, mask):
    tl.store(pointer + offset, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _total(tile):
    return tl.sum(tl.sum(tile, axis=1), axis=0)


@triton.jit(do_not_specialize=["T", "tokens_per_row"])
def _norm_forward(
    x,
    branch,
    branch_bias,
    scale,
    row_scale,
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
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """y = norm(s) with s = x, or s = x + row_scale · scale · (branch + bias e_A1) where there is a branch."""
    u_cell, u_in, u_first = _lines(M, BLOCK_M)
    v_cell, v_shared, v_in = _planes(M, BLOCK_M)
    u_gain = _load(gain, u_cell, u_in)
    v_gain = _load(gain, v_shared, v_in)
    u_shift = _load(shift, u_cell, u_first)
    if scale is not None:
        u_scale = _load(scale, u_cell, u_in)
        v_scale = _load(scale, v_shared, v_in)
    if branch_bias is not None:
        u_bias = _load(branch_bias, u_cell, u_first)

    for index in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(index, tl.int64)
        start = token * (8 * M)
        u = _load(x + start, u_cell, u_in)
        v = _load(x + start, v_cell, v_in)
        if branch is not None:
            du = _load(branch + start, u_cell, u_in)
            dv = _load(branch + start, v_cell, v_in)
            if branch_bias is not None:
                du += u_bias
            if scale is not None:
                du *= u_scale
                dv *= v_scale
            if row_scale is not None:
                factor = tl.load(row_scale + token // tokens_per_row)
                du *= factor
                dv *= factor
            # The norm sees what the next block will see, the rounded sum.
            u = (u + du).to(residual.dtype.element_ty)
            v = (v + dv).to(residual.dtype.element_ty)
            tl.store(residual + start + u_cell, u, mask=u_in)
            tl.store(residual + start + v_cell, v, mask=v_in)
            u = u.to(tl.float32)
            v = v.to(tl.float32)

        u_mean = tl.sum(u, axis=1) * (1.0 / M)
        v_mean = tl.sum(v, axis=1) * (0.5 / M)
        u = tl.where(u_in, u - u_mean[:, None], 0.0)
        v = tl.where(v_in, v - v_mean[:, None], 0.0)
        square = _total(u * u) + PAIR_WEIGHT * _total(v * v)
        rstd = tl.math.rsqrt(square * (0.125 / M) + EPS)
        _store(y + start, u_cell, u * rstd * u_gain + u_shift, u_in)
        _store(y + start, v_cell, v * rstd * v_gain, v_in)

        saved = statistics + token * _STATISTICS
        tl.store(saved + tl.arange(0, 4), u_mean)
        tl.store(saved + 4 + tl.arange(0, 2), v_mean)
        tl.store(saved + 6, rstd)


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
    dx,
    dbranch,
    partial,
    T,
    tokens_per_row,
    PAIR_WEIGHT: tl.constexpr,
    M: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Gradients of `_norm_forward`; that of the sum arrives as dy through the norm and as dstream past it.

        dx = rstd (w - w̄ - weight · x̂ · mean of w x̂) + dstream,    w = gain · dy
        dbranch = row_scale · scale · dx

    Sums over this program's tokens go to its line of partial[programs, WIDTH], in the order of the 6 M gains,
    M shifts, 6 M scales and M biases: dgain = Σ dy x̂, dshift = Σ dy, dscale = Σ row_scale dx (branch + bias),
    dbias = Σ dbranch.
    """
    u_cell, u_in, u_first = _lines(M, BLOCK_M)
    v_cell, v_shared, v_in = _planes(M, BLOCK_M)
    u_row = tl.arange(0, 4)[:, None]
    u_gain = _load(gain, u_cell, u_in)
    v_gain = _load(gain, v_shared, v_in)
    u_dgain = tl.zeros([4, BLOCK_M], tl.float32)
    v_dgain = tl.zeros([2, 2 * BLOCK_M], tl.float32)
    u_dshift = tl.zeros([4, BLOCK_M], tl.float32)
    if scale is not None:
        u_scale = _load(scale, u_cell, u_in)
        v_scale = _load(scale, v_shared, v_in)
        u_dscale = tl.zeros([4, BLOCK_M], tl.float32)
        v_dscale = tl.zeros([2, 2 * BLOCK_M], tl.float32)
    if branch_bias is not None:
        u_bias = _load(branch_bias, u_cell, u_first)
        u_dbias = tl.zeros([4, BLOCK_M], tl.float32)

    for index in tl.range(tl.program_id(0), T, tl.num_programs(0), num_stages=STAGES):
        token = tl.cast(index, tl.int64)
        start = token * (8 * M)
        # Every load of a step comes before its sums, so that they are all under way at once.
        u_dy = _load(dy + start, u_cell, u_in)
        v_dy = _load(dy + start, v_cell, v_in)
        u = _load(residual + start, u_cell, u_in)
        v = _load(residual + start, v_cell, v_in)
        if dstream is not None:
            u_dstream = tl.load(dstream + start + u_cell, mask=u_in, other=0.0)
            v_dstream = tl.load(dstream + start + v_cell, mask=v_in, other=0.0)
        if scale is not None:
            u_branch = tl.load(branch + start + u_cell, mask=u_in, other=0.0)
            v_branch = tl.load(branch + start + v_cell, mask=v_in, other=0.0)
        if row_scale is not None:
            factor = tl.load(row_scale + token // tokens_per_row)
        saved = statistics + token * _STATISTICS
        a1, a2, b1, b2 = tl.load(saved), tl.load(saved + 1), tl.load(saved + 2), tl.load(saved + 3)
        e1, e2, rstd = tl.load(saved + 4), tl.load(saved + 5), tl.load(saved + 6)

        u = (u - tl.where(u_row < 2, tl.where(u_row == 0, a1, a2), tl.where(u_row == 2, b1, b2))) * rstd
        v = (v - tl.where(tl.arange(0, 2)[:, None] == 0, e1, e2)) * rstd
        u_dgain += u_dy * u
        v_dgain += v_dy * v
        u_dshift += u_dy
        u_dy *= u_gain
        v_dy *= v_gain
        u_mean = tl.sum(u_dy, axis=1) * (1.0 / M)
        v_mean = tl.sum(v_dy, axis=1) * (0.5 / M)
        along = (_total(u_dy * u) + _total(v_dy * v)) * (0.125 / M)
        u = rstd * (u_dy - u_mean[:, None] - along * u)
        v = rstd * (v_dy - v_mean[:, None] - along * PAIR_WEIGHT * v)
        if dstream is not None:
            u += u_dstream.to(tl.float32)
            v += v_dstream.to(tl.float32)
        _store(dx + start, u_cell, u, u_in)
        _store(dx + start, v_cell, v, v_in)

        if dbranch is not None:
            if row_scale is not None:
                u *= factor
                v *= factor
            if scale is not None:
                u_branch = u_branch.to(tl.float32)
                if branch_bias is not None:
                    u_branch += u_bias
                u_dscale += u * u_branch
                v_dscale += v * v_branch.to(tl.float32)
                u *= u_scale
                v *= v_scale
            if branch_bias is not None:
                u_dbias += u
            _store(dbranch + start, u_cell, u, u_in)
            _store(dbranch + start, v_cell, v, v_in)

    line = partial + tl.program_id(0).to(tl.int64) * WIDTH
    e_cell = 4 * M + tl.arange(0, 2 * BLOCK_M)
    e_in = tl.arange(0, 2 * BLOCK_M) < 2 * M
    tl.store(line + u_cell, u_dgain, mask=u_in)
    tl.store(line + e_cell, tl.sum(v_dgain, axis=0), mask=e_in)
    tl.store(line + 6 * M + u_cell, u_dshift, mask=u_first)
    if scale is not None:
        tl.store(line + 7 * M + u_cell, u_dscale, mask=u_in)
        tl.store(line + 7 * M + e_cell, tl.sum(v_dscale, axis=0), mask=e_in)
    if branch_bias is not None:
        tl.store(line + 13 * M + u_cell, u_dbias, mask=u_first)


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
    _store(dgain, column, total, column < 6 * M)
    _store(dshift, column - 6 * M, total, (column >= 6 * M) & (column < 7 * M))
    if dscale is not None:
        _store(dscale, column - 7 * M, total, (column >= 7 * M) & (column < 13 * M))
    if dbias is not None:
        _store(dbias, column - 13 * M, total, (column >= 13 * M) & (column < 14 * M))


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tile(kernel: str, tiles: dict[int, tuple[int, int, int]], x: torch.Tensor) -> tuple[int, ...]:
    """What tuning found for tokens like those of x, else the entry of the table that they fit."""
    m = x.shape[1] // 8
    width = 8 * triton.next_power_of_2(m)
    default = next((entry for limit, entry in tiles.items() if width <= limit), list(tiles.values())[-1])
    return tile(kernel, (m, x.element_size()), x.device, default)


def _forward(
    x: torch.Tensor,
    branch: torch.Tensor | None,
    branch_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    tokens_per_row: int,
    gain: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None,
    pair_weight: float,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    tokens, channels = x.shape
    residual = None if branch is None else torch.empty_like(x)
    y = torch.empty_like(x, dtype=dtype or x.dtype)
    statistics = torch.empty((tokens, STATISTICS), dtype=torch.float32, device=x.device)
    if tokens == 0:
        return residual, y, statistics
    block_m = triton.next_power_of_2(channels // 8)
    warps, per_multiprocessor, stages = _tile("norm forward", FORWARD_TILES, x)
    programs = min(tokens, per_multiprocessor * _multiprocessors(x.device))
    with torch.cuda.device_of(x):
        traced(_norm_forward)[(programs,)](
            x,
            branch,
            branch_bias,
            scale,
            row_scale,
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
            BLOCK_M=block_m,
            STAGES=stages,
            num_warps=warps,
        )
    return residual, y, statistics


def _backward(
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
    pair_weight: float,
) -> tuple[
    torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None
]:
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

    block_m = triton.next_power_of_2(m)
    warps, per_multiprocessor, stages = _tile("norm backward", BACKWARD_TILES, residual)
    programs = min(tokens, per_multiprocessor * _multiprocessors(residual.device))
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
            dx,
            dbranch,
            partial,
            tokens,
            tokens_per_row,
            PAIR_WEIGHT=pair_weight,
            M=m,
            WIDTH=width,
            BLOCK_M=block_m,
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


def norm_forward(
    x: torch.Tensor,
    gain: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    pair_weight: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Octic layer norm of x[T, C]: y[T, C] in the given dtype (default: that of x) and statistics[T, 7]."""
    _, y, statistics = _forward(x, None, None, None, None, 1, gain, shift, eps, dtype, pair_weight)
    return y, statistics


def residual_norm_forward(
    x: torch.Tensor,
    branch: torch.Tensor,
    branch_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    tokens_per_row: int,
    gain: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    dtype: torch.dtype | None = None,
    pair_weight: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Residual addition and the octic layer norm after it, in one pass.

        residual = x + row_scale · scale · (branch + branch_bias e_A1),    y = norm(residual)

    x, branch[T, C], branch_bias[C/8], scale[3C/4] (layer scale), row_scale[T / tokens_per_row] in float32
    (stochastic depth). residual has the dtype of x, y the given dtype (default: that of branch); y is the norm
    of the residual as it was rounded. Returns residual, y, statistics[T, 7].
    """
    residual, y, statistics = _forward(
        x,
        branch,
        branch_bias,
        scale,
        row_scale,
        tokens_per_row,
        gain,
        shift,
        eps,
        dtype or branch.dtype,
        pair_weight,
    )
    assert residual is not None
    return residual, y, statistics


def norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    statistics: torch.Tensor,
    gain: torch.Tensor,
    dstream: torch.Tensor | None = None,
    pair_weight: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `norm_forward`: dx, plus dstream where given, and dgain[3C/4], dshift[C/8]."""
    dx, _, dgain, dshift, _, _ = _backward(
        dy, dstream, x, statistics, gain, None, None, None, None, 1, pair_weight
    )
    return dx, dgain, dshift


def residual_norm_backward(
    dy: torch.Tensor,
    dstream: torch.Tensor | None,
    residual: torch.Tensor,
    statistics: torch.Tensor,
    gain: torch.Tensor,
    branch: torch.Tensor,
    branch_bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    row_scale: torch.Tensor | None,
    tokens_per_row: int,
    pair_weight: float = 1.0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of `residual_norm_forward`: dx, dbranch, dgain, dshift, dscale, dbranch_bias.

    dx is the gradient of the residual and of x alike. dscale and dbranch_bias are None where there is no such
    parameter.
    """
    dx, dbranch, dgain, dshift, dscale, dbias = _backward(
        dy,
        dstream,
        residual,
        statistics,
        gain,
        branch,
        branch_bias,
        scale,
        row_scale,
        tokens_per_row,
        pair_weight,
    )
    assert dbranch is not None
    return dx, dbranch, dgain, dshift, dscale, dbias
