"""What attention and its gradient share on NVIDIA's Hopper: blocks of 64 tokens of a head, and their products.

The vectors of a block, of q, k or v, are tiles in shared memory or registers, one for each of the parts into which a
vector is cut; parts have a power of two of columns. Products then do little more than they have to, where general
kernels round vectors up to 128 entries.

Octic features are heads in PAIRS, see `heads.py`; those of standard blocks have their entries in order.
"""

import math

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from quickvit.ops.triton.boxes import accumulators, in_boxes, load_box, view_as

# By head size: the columns of a vector's parts. In the last of 104 eight are zero.
PARTS: dict[int, tuple[int, ...]] = {80: (64, 16), 104: (64, 32, 16), 112: (64, 32, 16)}
SIDE = gl.constexpr(64)
LOG2E = gl.constexpr(1 / math.log(2))


@gluon.constexpr_function
def operand(columns):
    """Where entries of the left operand are whose product has so many columns."""
    return gl.DotOperandLayout(operand_index=0, parent=accumulators(columns), k_width=2)


@gluon.jit
def nothing(COLUMNS: gl.constexpr):
    """A product without terms."""
    return gl.zeros((SIDE, COLUMNS), gl.float32, layout=accumulators(COLUMNS))


@gluon.jit
def allocate(boxes, COUNT: gl.constexpr):
    """Shared memory for one part of so many blocks."""
    COLUMNS: gl.constexpr = boxes.block_type.shape[3]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([SIDE, COLUMNS], boxes.dtype)
    return gl.allocate_shared_memory(boxes.dtype, [COUNT, SIDE, COLUMNS], layout)


@gluon.constexpr_function
def columns_of(parts, count):
    """How many columns the first parts of a vector have together."""
    return sum(part.shape[-1] for part in parts[:count])


@gluon.jit
def load(boxes, memory, place, barrier, item, block, HEADS: gl.constexpr):
    """A block of a head begins to be loaded; what lies past the end of a sequence, or of a head, is zero."""
    for part in gl.static_range(len(memory)):
        source, target = boxes[part], memory[part].index(place)
        target = view_as(target, target.dtype, source.block_type.shape, source.layout)
        load_box(source, [item // HEADS, block * SIDE, item % HEADS, 0], barrier, target)


@gluon.jit
def for_columns(rows, COLUMNS: gl.constexpr):
    """Left operands in registers, for a product with so many columns: the same registers."""
    result = ()
    for part in gl.static_range(len(rows)):
        result += (gl.convert_layout(rows[part], operand(COLUMNS)),)
    return result


@gluon.jit
def in_registers(memory, block):
    """A block as a left operand in registers."""
    rows = ()
    for part in gl.static_range(len(memory)):
        rows += (memory[part].index(block).load(operand(SIDE)),)
    return rows


@gluon.jit
def begin_scores(rows, memory, block, COLUMNS: gl.constexpr):
    """The product of rows with the first tokens of a block, over the entries of their vectors, begins."""
    total = nothing(COLUMNS)
    for part in gl.static_range(len(memory)):
        right = memory[part].index(block).slice(0, COLUMNS).permute((1, 0))
        total = warpgroup_mma(rows[part], right, total, use_acc=part > 0, is_async=True)
    return total


@gluon.jit
def begin_sums(weights, memory, block, sums):
    """The product of weights with the first tokens of a block, over the tokens, begins to be added to sums."""
    COLUMNS: gl.constexpr = weights.shape[1]
    result = ()
    for part in gl.static_range(len(memory)):
        left = gl.convert_layout(weights.to(memory[part].dtype), operand(memory[part].shape[2]))
        right = memory[part].index(block).slice(0, COLUMNS)
        result += (warpgroup_mma(left, right, sums[part], is_async=True),)
    return result


@gluon.jit
def along_rows(line, values):
    """A number for each row, to be combined with a tile of values."""
    return gl.convert_layout(line, gl.SliceLayout(1, accumulators(values.shape[1])))[:, None]


@gluon.jit
def times(parts, line):
    """All parts, each row times a number."""
    result = ()
    for part in gl.static_range(len(parts)):
        result += (parts[part] * along_rows(line, parts[part]),)
    return result


@gluon.jit
def without(scores, block, N):
    """Scores less those of keys past the end."""
    COLUMNS: gl.constexpr = scores.shape[1]
    key = block * SIDE + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, accumulators(COLUMNS)))
    return gl.where((key < N)[None, :], scores, -float("inf"))


@gluon.jit
def tokens_of(block, COLUMNS: gl.constexpr):
    """The tokens of a block, as rows of a product."""
    return block * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, accumulators(COLUMNS)))


@gluon.constexpr_function
def _four_each(columns):
    """Where entries are if each thread has four neighbours, and four threads 32 bytes."""
    rest = [[0, column] for column in (16, 32) if column < columns]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], *rest, [8, 0]],
        lane_bases=[[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def _place(feature, block, N, COLUMNS: gl.constexpr, LEFT: gl.constexpr, ROW: gl.constexpr):
    """Where a block has entries of a part, and which of them exist: a vector has so many entries LEFT."""
    layout: gl.constexpr = _four_each(COLUMNS)
    token = block * SIDE + gl.arange(0, SIDE, layout=gl.SliceLayout(1, layout))[:, None]
    entry = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    inside = token < N
    if LEFT < COLUMNS:
        inside = inside & (entry < LEFT)
    return feature + token.to(gl.int64) * ROW + entry, inside


@gluon.jit
def _put_part(feature, value, block, N, LEFT: gl.constexpr, ROW: gl.constexpr, PAIRS: gl.constexpr):
    COLUMNS: gl.constexpr = value.shape[1]
    place, inside = _place(feature, block, N, COLUMNS, LEFT, ROW)
    value = value.to(feature.dtype.element_ty)
    if PAIRS:
        # Without moving anything: a thread's pairs are side by side.
        pairs = value.reshape([SIDE, COLUMNS // 16, 2, 4, 2]).permute([0, 1, 3, 2, 4])
        value = pairs.reshape([SIDE, COLUMNS])
    gl.store(place, gl.convert_layout(value, _four_each(COLUMNS)), mask=inside)


@gluon.jit
def put(feature, parts, block, N, DIM: gl.constexpr, ROW: gl.constexpr, PAIRS: gl.constexpr):
    """Store the vectors of a block, ROW entries apart."""
    for part in gl.static_range(len(parts)):
        _put_part(feature, parts[part], block, N, DIM - columns_of(parts, part), ROW, PAIRS)
        feature += parts[part].shape[1]


@gluon.jit
def get_part(feature, block, N, COLUMNS: gl.constexpr, ROW: gl.constexpr, PAIRS: gl.constexpr):
    """A part of what `put` has stored; zero past the end."""
    place, inside = _place(feature, block, N, COLUMNS, COLUMNS, ROW)
    value = gl.load(place, mask=inside, other=0.0)
    if PAIRS:
        pairs = value.reshape([SIDE, COLUMNS // 16, 4, 2, 2]).permute([0, 1, 3, 2, 4])
        value = pairs.reshape([SIDE, COLUMNS])
    return gl.convert_layout(value, accumulators(COLUMNS))


def in_parts(feature: torch.Tensor) -> list[TensorDescriptor]:
    """The parts of a feature [B, N, H, D] in blocks."""
    boxes, start = [], 0
    for columns in PARTS[feature.shape[3]]:
        boxes.append(in_boxes(feature[..., start : start + columns], (1, 64, 1, columns)))
        start += columns
    return boxes


def block_sizes(length: int) -> dict[str, int]:
    """In how many blocks a sequence is, and how many tokens of the last one are multiplied with."""
    blocks = -(-length // 64)
    return {"BLOCKS": blocks, "TAIL": max(16, 1 << (length - 64 * (blocks - 1) - 1).bit_length())}
