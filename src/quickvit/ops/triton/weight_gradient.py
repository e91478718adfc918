"""Weight gradients of the octic linear map, all blocks in one launch, and those of its bias.

    dW_ρ = Σ_t g_t x_tᵀ,    for E summed over both components

grad[T, F] and x[T, C] are packed: A1, A2, B1, B2 are four products [F/8, T] [T, C/8], the components of E two of
[F/4, T] [T, C/4]. Few tiles against many tokens: the tokens are cut into slices, and a work item is one tile over one
slice, all of equal cost. Items write partial sums, which a second launch adds up in a fixed order, so that a result
never depends on timing. The items of a slice lie next to each other in the launch: they run at the same time and
share what they read through the L2 cache.

A tile is [OWN, WIDE + REST]. The narrower of the widths F/8 and C/8 is often no multiple of a power of two as large
as a tile should be, but a sum of two (160 = 128 + 32): it runs along WIDE + REST, two products with a common operand.
"""

import math

import torch
import triton
import triton.language as tl

from quickvit.ops.tiles import tile
from quickvit.ops.triton.launch import multiprocessors, shared_memory, traced

# OWN, WIDE, REST, tokens per step, warps, stages, programs per multiprocessor.
Tile = tuple[int, int, int, int, int, int, int]
TILE: Tile = (128, 128, 0, 64, 4, 3, 2)
# By the narrower of F/8 and C/8: tiles that beat the products of cuBLAS.
TILES: dict[int, Tile] = {128: (128, 128, 0, 64, 4, 4, 1), 160: (128, 128, 32, 64, 4, 3, 2)}
# Slices and entries per step, warps: the sum over slices.
SUM_TILE: tuple[int, int, int] = (8, 512, 4)
# Tokens per step, columns, most slices, warps: the sum over tokens, of which the bias has its gradient.
BIAS_TILE: tuple[int, int, int, int] = (32, 128, 128, 4)
# Columns per program of the sum over those slices.
SUM_COLUMNS = 16


@triton.jit
def _load(line, column, inside, width, VECTOR: tl.constexpr):
    """Columns of some tokens. Those past the width are column 0 again, whose products nobody asks for."""
    column = tl.max_contiguous(tl.multiple_of(tl.where(column < width, column, 0), VECTOR), VECTOR)
    pointer = line + column[None, :]
    return tl.load(pointer) if inside is None else tl.load(pointer, mask=inside[:, None], other=0.0)


@triton.jit
def _store(partial, sums, row, column, rows, columns):
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(partial + row[:, None] * columns + column[None, :], sums, mask=mask)


@triton.jit(do_not_specialize=["T", "steps"])
def _partial_sums(
    a,
    b,
    partial,
    T,
    a_stride,
    b_stride,
    steps,
    A: tl.constexpr,
    B: tl.constexpr,
    EVEN: tl.constexpr,
    VECTOR: tl.constexpr,
    OWN: tl.constexpr,
    WIDE: tl.constexpr,
    REST: tl.constexpr,
    STEP: tl.constexpr,
):
    """Σ_t a_t b_tᵀ over `steps` steps of tokens, one tile of one block, to partial[slice, 12 A B]."""
    SPAN: tl.constexpr = WIDE + REST
    LINES: tl.constexpr = ((A + OWN - 1) // OWN) * ((B + SPAN - 1) // SPAN)
    PLANES: tl.constexpr = ((2 * A + OWN - 1) // OWN) * ((2 * B + SPAN - 1) // SPAN)
    item = tl.program_id(0) % (4 * LINES + 2 * PLANES)
    part = tl.program_id(0) // (4 * LINES + 2 * PLANES)
    in_plane = item >= 4 * LINES
    item = tl.where(in_plane, item - 4 * LINES, item)
    block = item // tl.where(in_plane, PLANES, LINES)
    index = item % tl.where(in_plane, PLANES, LINES)
    copies = tl.where(in_plane, 2, 1)
    across = tl.cdiv(copies * B, SPAN)
    # Blocks of the one-dimensional irreps start at 0 1 2 3, those of E at 4 and 6 widths.
    first = tl.where(in_plane, 4 + 2 * block, block)

    row = index // across * OWN + tl.arange(0, OWN)
    column = index % across * SPAN + tl.arange(0, WIDE)
    token = tl.arange(0, STEP)
    start = part * steps
    end = tl.minimum(start + steps, tl.cdiv(T, STEP))
    a_line = a + (start * STEP).to(tl.int64) * a_stride + first * A + token[:, None] * a_stride
    b_line = b + (start * STEP).to(tl.int64) * b_stride + first * B + token[:, None] * b_stride
    sums = tl.zeros([OWN, WIDE], tl.float32)
    if REST > 0:
        other = index % across * SPAN + WIDE + tl.arange(0, REST)
        rest = tl.zeros([OWN, REST], tl.float32)
    for step in range(start, end):
        inside = None if EVEN else step * STEP + token < T
        left = tl.trans(_load(a_line, row, inside, copies * A, VECTOR))
        right = _load(b_line, column, inside, copies * B, VECTOR)
        sums = tl.dot(left, right, sums, input_precision="ieee")
        if REST > 0:
            right = _load(b_line, other, inside, copies * B, VECTOR)
            rest = tl.dot(left, right, rest, input_precision="ieee")
        a_line += STEP * a_stride
        b_line += STEP * b_stride

    target = partial + part.to(tl.int64) * (12 * A * B)
    target += tl.where(in_plane, 4 + 4 * block, block) * (A * B)
    _store(target, sums, row, column, copies * A, copies * B)
    if REST > 0:
        _store(target, rest, row, other, copies * A, copies * B)


@triton.jit(do_not_specialize=["slices"])
def _sum_slices(
    partial,
    weight_1,
    weight_2,
    slices,
    A: tl.constexpr,
    B: tl.constexpr,
    TURNED: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sum over the slices of partial[slices, 12 A B] to the 4 A B entries of each weight, transposed if TURNED."""
    SIZE: tl.constexpr = A * B
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    in_plane = (entry >= 4 * SIZE) & (entry < 8 * SIZE)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, slices, STEP):
        part = first + tl.arange(0, STEP)
        line = partial + part.to(tl.int64)[:, None] * (12 * SIZE) + entry[None, :]
        exists = (part < slices)[:, None]
        one = tl.load(line, mask=exists & (entry < 8 * SIZE)[None, :], other=0.0)
        # The second component of E.
        two = tl.load(line + 4 * SIZE, mask=exists & in_plane[None, :], other=0.0)
        total += tl.sum(one + two, axis=0)
    place = entry
    if TURNED:
        line = entry // B
        place = entry // SIZE * SIZE + entry % B * A + line % A
        plane = (entry - 4 * SIZE) // (2 * B)
        place = tl.where(in_plane, 4 * SIZE + entry % (2 * B) * (2 * A) + plane, place)
    value = total.to(weight_1.dtype.element_ty)
    tl.store(weight_1 + place, value, mask=entry < 4 * SIZE)
    tl.store(weight_2 + (place - 4 * SIZE), value, mask=in_plane)


@triton.jit(do_not_specialize=["T"])
def _column_sums(x, partial, T, stride, WIDTH: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr):
    """Σ_t x_t over every so-manieth step of tokens, some columns, to partial[slices, WIDTH]."""
    part, parts = tl.program_id(0), tl.num_programs(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([STEP, COLUMNS], tl.float32)
    for first in range(part * STEP, T, parts * STEP):
        token = first + tl.arange(0, STEP)
        mask = (token < T)[:, None] & (column < WIDTH)[None, :]
        total += tl.load(x + token.to(tl.int64)[:, None] * stride + column[None, :], mask=mask, other=0.0)
    tl.store(partial + part * WIDTH + column, tl.sum(total, axis=0), mask=column < WIDTH)


@triton.jit
def _sum_rows(
    partial, total, ROWS: tl.constexpr, WIDTH: tl.constexpr, STEP: tl.constexpr, COLUMNS: tl.constexpr
):
    """Σ over partial[ROWS, WIDTH], some columns, to total[WIDTH]."""
    row, column = tl.arange(0, STEP), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < ROWS)[:, None] & (column < WIDTH)[None, :]
    sums = tl.sum(tl.load(partial + row[:, None] * WIDTH + column[None, :], mask=mask, other=0.0), axis=0)
    tl.store(total + column, sums.to(total.dtype.element_ty), mask=column < WIDTH)


def takes(grad: torch.Tensor, x: torch.Tensor) -> bool:
    """Whether this is the fastest way known for grad[T, F] and x[T, C] of D8, and there is room for it."""
    narrower = min(grad.shape[1], x.shape[1]) // 8
    if not grad.is_cuda or x.element_size() != 2 or narrower not in TILES:
        return False
    own, wide, rest, step, _, stages, _ = TILES[narrower]
    return 2 * stages * step * (own + wide + rest) <= shared_memory(grad.device)


def weight_gradient(grad: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """dW of the one-dimensional irreps [4, F/8, C/8] and of E [1, F/4, C/4], of grad[T, F] and x[T, C].

    Rows may lie apart, channels lie side by side. Products of float32 are exact to float32.
    """
    tokens, rows, columns = x.shape[0], grad.shape[1] // 8, x.shape[1] // 8
    weight_1 = torch.empty((4, rows, columns), dtype=grad.dtype, device=grad.device)
    weight_2 = torch.empty((1, 2 * rows, 2 * columns), dtype=grad.dtype, device=grad.device)
    if not tokens:
        return weight_1.zero_(), weight_2.zero_()
    turned = rows < columns
    (a, a_width), (b, b_width) = ((x, columns), (grad, rows)) if turned else ((grad, rows), (x, columns))
    own, wide, rest, step, warps, stages, per_multiprocessor = tile(
        "weight gradient",
        (rows, columns, tokens, x.element_size()),
        x.device,
        TILES.get(min(rows, columns), TILE),
    )
    items = sum(
        blocks * triton.cdiv(k * a_width, own) * triton.cdiv(k * b_width, wide + rest)
        for blocks, k in ((4, 1), (2, 2))
    )
    slices = max(1, per_multiprocessor * multiprocessors(x.device) // items)
    steps = triton.cdiv(triton.cdiv(tokens, step), slices)
    slices = triton.cdiv(triton.cdiv(tokens, step), steps)
    partial = torch.empty((slices, 12 * rows * columns), dtype=torch.float32, device=x.device)
    sum_step, block, sum_warps = SUM_TILE
    with torch.cuda.device_of(x):
        traced(_partial_sums)[(slices * items,)](
            a,
            b,
            partial,
            tokens,
            a.stride(0),
            b.stride(0),
            steps,
            A=a_width,
            B=b_width,
            EVEN=tokens % step == 0,
            VECTOR=math.gcd(rows, columns, 16 // x.element_size()),
            OWN=own,
            WIDE=wide,
            REST=rest,
            STEP=step,
            num_warps=warps,
            num_stages=stages,
        )
        traced(_sum_slices)[(triton.cdiv(8 * rows * columns, block),)](
            partial,
            weight_1,
            weight_2,
            slices,
            A=a_width,
            B=b_width,
            TURNED=turned,
            STEP=sum_step,
            BLOCK=block,
            num_warps=sum_warps,
        )
    return weight_1, weight_2


def bias_gradient(grad: torch.Tensor, width: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum over all tokens of the first `width` columns of grad[T, F], in a fixed order."""
    step, columns, most, warps = BIAS_TILE
    slices = max(1, min(triton.cdiv(grad.shape[0], step), most))
    partial = torch.empty((slices, width), dtype=torch.float32, device=grad.device)
    total = torch.empty(width, dtype=dtype, device=grad.device)
    with torch.cuda.device_of(grad):
        traced(_column_sums)[(slices, triton.cdiv(width, columns))](
            grad,
            partial,
            grad.shape[0],
            grad.stride(0),
            WIDTH=width,
            STEP=step,
            COLUMNS=columns,
            num_warps=warps,
        )
        traced(_sum_rows)[(triton.cdiv(width, SUM_COLUMNS),)](
            partial,
            total,
            ROWS=slices,
            WIDTH=width,
            STEP=triton.next_power_of_2(slices),
            COLUMNS=SUM_COLUMNS,
            num_warps=warps,
        )
    return total
