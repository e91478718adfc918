"""A token of packed channels as tiles, for kernels that sum over the channels of each irrep.

x[C] has m = C/8: A1, A2, B1, B2 are four blocks of m columns, the components of E two blocks of 2m. A token is held
as two tiles, lines [4, m] and planes [2, 2m], so that sums over a block are sums along rows. Sizes of tiles are
powers of two: an m that would be padded too much is two of them, and a token four tiles (160 = 128 + 32).

A gain has 6m entries (4m, then 2m for both components of E), what acts on A1 alone m.
"""

import triton
import triton.language as tl


def parts_of(m: int) -> tuple[int, int]:
    """m copies as one power of two, or as two if they pad less."""
    whole = triton.next_power_of_2(m)
    rest = max(4, triton.next_power_of_2(m - whole // 2))
    return (whole, 0) if 2 * rest > whole // 2 else (whole // 2, rest)


@triton.jit
def store(pointer, offset, value, mask):
    """Store in the type that is there."""
    tl.store(pointer + offset, value.to(pointer.dtype.element_ty), mask=mask)


@triton.jit
def _line_tile(M: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr):
    """Columns of a tile [4, SIZE] of one-dimensional irreps, their entries in a gain, which exist, and their rows."""
    row, column = tl.arange(0, 4)[:, None], START + tl.arange(0, SIZE)[None, :]
    return row * M + column, row * M + column, column < M, row


@triton.jit
def _plane_tile(M: tl.constexpr, START: tl.constexpr, SIZE: tl.constexpr):
    """The same of a tile [2, 2 SIZE] of the components of E."""
    row, column = tl.arange(0, 2)[:, None], 2 * START + tl.arange(0, 2 * SIZE)[None, :]
    # Each component loads its own copy of a gain: to share one, it would have to pass through shared memory.
    return 4 * M + row * (2 * M) + column, 4 * M + row * 0 + column, column < 2 * M, row


@triton.jit
def token_tiles(M: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr):
    """The tiles of a token: lines and planes by turns, first of BLOCK copies, then of REST if any."""
    tiles = (_line_tile(M, 0, BLOCK), _plane_tile(M, 0, BLOCK))
    if REST > 0:
        tiles += (_line_tile(M, BLOCK, REST), _plane_tile(M, BLOCK, REST))
    return tiles


@triton.jit
def zeros(tiles):
    """A sum for each entry of the tiles, still empty."""
    sums = ()
    for t in tl.static_range(len(tiles)):
        sums += (tl.zeros(tiles[t][0].shape, tl.float32),)
    return sums


@triton.jit
def load_tiles(pointer, tiles, PLACE: tl.constexpr):
    """Tiles of a token (PLACE 0) or of a gain (PLACE 1), as they are stored."""
    values = ()
    for t in tl.static_range(len(tiles)):
        values += (tl.load(pointer + tiles[t][PLACE], mask=tiles[t][2], other=0.0),)
    return values


@triton.jit
def store_tiles(pointer, tiles, values):
    """Store the tiles of a token."""
    for t in tl.static_range(len(tiles)):
        store(pointer, tiles[t][0], values[t], tiles[t][2])


@triton.jit
def row_of(rows, token):
    """The row that belongs to a token: its own where there are no `rows`, or -1 for none."""
    if rows is None:
        return token
    else:
        return tl.load(rows + token).to(tl.int64)


@triton.jit
def of_row(rows, row, tiles):
    """The tiles, empty where a token has no row."""
    if rows is None:
        return tiles
    else:
        some = ()
        for t in tl.static_range(len(tiles)):
            some += ((tiles[t][0], tiles[t][1], tl.where(row < 0, False, tiles[t][2]), tiles[t][3]),)
        return some


@triton.jit
def store_gains(line, tiles, values):
    """Sums in the order of a gain: those of the components of E together."""
    for t in tl.static_range(len(tiles)):
        if t % 2 == 0:
            tl.store(line + tiles[t][1], values[t], mask=tiles[t][2])
        else:
            both = tl.sum(values[t], axis=0)[None, :]
            tl.store(line + tiles[t][1], both, mask=tiles[t][2] & (tiles[t][3] == 0))


@triton.jit
def is_invariant(tile):
    """Which entries of a tile of lines are A1."""
    return tile[2] & (tile[3] == 0)


@triton.jit
def load_invariant(pointer, tiles):
    """What acts on A1 alone, as tiles of lines."""
    values = ()
    for t in tl.static_range(0, len(tiles), 2):
        values += (tl.load(pointer + tiles[t][0], mask=is_invariant(tiles[t]), other=0.0).to(tl.float32),)
    return values


@triton.jit
def normalise(stream, tiles, EPS: tl.constexpr, PAIR_WEIGHT: tl.constexpr, M: tl.constexpr):
    """Of a token the means of its blocks, what it is without them, and the reciprocal standard deviation of that."""
    line_mean = tl.zeros([4], tl.float32)
    plane_mean = tl.zeros([2], tl.float32)
    for t in tl.static_range(len(tiles)):
        sums = tl.sum(stream[t].to(tl.float32), axis=1)
        if t % 2 == 0:
            line_mean += sums * (1.0 / M)
        else:
            plane_mean += sums * (0.5 / M)
    centred = ()
    square = 0.0
    for t in tl.static_range(len(tiles)):
        if t % 2 == 0:
            z = tl.where(tiles[t][2], stream[t].to(tl.float32) - line_mean[:, None], 0.0)
            square += tl.sum(tl.sum(z * z, axis=1), axis=0)
        else:
            z = tl.where(tiles[t][2], stream[t].to(tl.float32) - plane_mean[:, None], 0.0)
            square += PAIR_WEIGHT * tl.sum(tl.sum(z * z, axis=1), axis=0)
        centred += (z,)
    # Squares that overflow would give zeros, which nobody takes for a run that has diverged.
    rstd = tl.where(square < float("inf"), tl.math.rsqrt(square * (0.125 / M) + EPS), float("nan"))
    return line_mean, plane_mean, centred, rstd
