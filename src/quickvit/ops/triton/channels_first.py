"""Attention over channels that lie in rows, one row for all tokens, so that whole tiles are copied to shared memory.

    o_i = Σ_j softmax_j(q_i · k_j / √D) v_j

qkv[3C, T] is the transpose of the packed output of an octic linear map C → 3C: with c = C/8/H for H heads the rows of
A1, A2, B1, B2 run over (q k v, head, c), those of the two components of E over (q k v, head, 2c). A head's rows of
the four lines, and of the two planes, are boxes [4, c, n] and [2, 2c, n] of tensors with three axes, which the tensor
memory accelerator of Hopper copies whatever c is. Of a packed token a head has six pieces of 2c or 4c bytes, too
short to be read fast; here tokens are side by side. The result is in rows too, o[C, T].

Boxes begin at multiples of 16 bytes, eight tokens. So a program sees its sequence from the last such place before it
on: `shift` positions belong to the sequence before, and what follows to the next one. The first keys and the last,
STEP and TAIL of them, are therefore masked, and go first: their values too, since a weight of zero does not undo what
is not a number. Boxes have powers of two as sides: PIECE rows instead of
c, of which the others, rows of the next head, meet zeros in q and are not written.

The A1 bias of q is added to q; that of k shifts the scores of a query all alike, so softmax does not see it; that of
v is added to the output, since the weights sum to one.
"""

import math

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quickvit.ops.tiles import tile

# By the channels c of a head in each line: queries per program, keys per step, warps and stages.
TILES: dict[int, tuple[int, int, int, int]] = {
    8: (64, 64, 4, 3),
    10: (64, 32, 4, 3),
    13: (64, 32, 4, 3),
    14: (64, 32, 4, 3),
    16: (64, 32, 4, 3),
}
# Tokens: 16 bytes of a 16-bit type.
ALIGNMENT = 8

_LOG2E = tl.constexpr(1 / math.log(2))
_ALIGNMENT = tl.constexpr(ALIGNMENT)


@triton.jit
def _rows(head, HEADS: tl.constexpr, c: tl.constexpr, PIECE: tl.constexpr):
    """A head's rows of lines and of planes in the result, as they follow in boxes."""
    j = tl.arange(0, 4 * PIECE)
    m: tl.constexpr = HEADS * c
    line = j // PIECE * m + head * c + j % PIECE
    plane = 4 * m + j // (2 * PIECE) * (2 * m) + 2 * head * c + j % (2 * PIECE)
    return line.to(tl.int64), plane.to(tl.int64)


@triton.jit
def _exist(c: tl.constexpr, PIECE: tl.constexpr):
    """Which rows of boxes are the head's own."""
    j = tl.arange(0, 4 * PIECE)
    return j % PIECE < c, j % (2 * PIECE) < 2 * c


@triton.jit
def _boxes(
    lines,
    planes,
    part,
    head,
    token,
    HEADS: tl.constexpr,
    c: tl.constexpr,
    PIECE: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """The rows of a head in q, k or v (part 0, 1, 2), TOKENS of them from `token` on: [4 PIECE, TOKENS] twice."""
    row = (part * HEADS + head) * c
    return (
        lines.load([0, row, token]).reshape(4 * PIECE, TOKENS),
        planes.load([0, 2 * row, token]).reshape(4 * PIECE, TOKENS),
    )


@triton.jit
def _choose(inside, boxes):
    """Boxes with zeros for the tokens that are not inside."""
    return tl.where(inside[None, :], boxes[0], 0.0), tl.where(inside[None, :], boxes[1], 0.0)


@triton.jit
def _step(q, k, v, inside, largest, total, sums, SCALE: tl.constexpr):
    """One step of softmax in base 2: the largest score, the sum of weights and of weighted values so far."""
    score = tl.dot(q[0], k[0])
    score = tl.dot(q[1], k[1], score)
    if inside is not None:
        score = tl.where(inside[None, :], score, -float("inf"))
    larger = tl.maximum(largest, tl.max(score, axis=1) * SCALE)
    weight = tl.math.exp2(score * SCALE - larger[:, None])
    shrink = tl.math.exp2(largest - larger)
    total = total * shrink + tl.sum(weight, axis=1)
    share = weight.to(v[0].dtype)
    lines = tl.dot(share, tl.trans(v[0]), sums[0] * shrink[:, None])
    planes = tl.dot(share, tl.trans(v[1]), sums[1] * shrink[:, None])
    return larger, total, (lines, planes)


@triton.jit
def _write(place, value, row_exists, owned, whole):
    """Store rows of tokens, those that are owned, which may be all."""
    value = value.to(place.dtype.element_ty)
    if whole:
        # Eight entries at a time.
        tl.store(place, value, mask=row_exists[:, None])
    else:
        tl.store(place, value, mask=row_exists[:, None] & owned[None, :])


@triton.jit(do_not_specialize=["N"])
def _attention_channels_first(
    q_lines,
    q_planes,
    lines,
    planes,
    tail_lines,
    tail_planes,
    bias,
    out,
    stride,
    N,
    HEADS: tl.constexpr,
    c: tl.constexpr,
    PIECE: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    TAIL: tl.constexpr,
):
    """BLOCK queries of one head against all keys."""
    SCALE: tl.constexpr = _LOG2E / (8 * c) ** 0.5
    blocks = tl.cdiv(N + _ALIGNMENT - 1, BLOCK)
    pair = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * BLOCK
    head, sequence = pair % HEADS, pair // HEADS
    shift = sequence * N % _ALIGNMENT
    token = tl.multiple_of(sequence * N - shift, _ALIGNMENT)
    end = shift + N
    j = tl.arange(0, 4 * PIECE)

    q = _boxes(q_lines, q_planes, 0, head, token + first, HEADS, c, PIECE, BLOCK)
    if bias is not None:
        added = tl.load(bias + head * c + j, mask=j < c, other=0.0).to(tl.float32)
        q = (q[0].to(tl.float32) + added[:, None]).to(q[0].dtype), q[1]
    line_exists, plane_exists = _exist(c, PIECE)
    if c < PIECE:
        q = tl.where(line_exists[:, None], q[0], 0.0), tl.where(plane_exists[:, None], q[1], 0.0)
    q = tl.trans(q[0]), tl.trans(q[1])

    largest = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    sums = tl.zeros([BLOCK, 4 * PIECE], tl.float32), tl.zeros([BLOCK, 4 * PIECE], tl.float32)
    edge = tl.arange(0, STEP)
    inside = (edge >= shift) & (edge < end)
    k = _boxes(lines, planes, 1, head, token, HEADS, c, PIECE, STEP)
    v = _choose(inside, _boxes(lines, planes, 2, head, token, HEADS, c, PIECE, STEP))
    largest, total, sums = _step(q, k, v, inside, largest, total, sums, SCALE)
    last = tl.maximum(end // STEP, 1) * STEP
    left = last + tl.arange(0, TAIL) < end
    k_tail = _boxes(tail_lines, tail_planes, 1, head, token + last, HEADS, c, PIECE, TAIL)
    v_tail = _boxes(tail_lines, tail_planes, 2, head, token + last, HEADS, c, PIECE, TAIL)
    largest, total, sums = _step(q, k_tail, _choose(left, v_tail), left, largest, total, sums, SCALE)
    for start in range(STEP, last, STEP):
        k = _boxes(lines, planes, 1, head, token + start, HEADS, c, PIECE, STEP)
        v = _boxes(lines, planes, 2, head, token + start, HEADS, c, PIECE, STEP)
        largest, total, sums = _step(q, k, v, None, largest, total, sums, SCALE)

    line_sums, plane_sums = tl.trans(sums[0] / total[:, None]), tl.trans(sums[1] / total[:, None])
    if bias is not None:
        added = tl.load(bias + 2 * HEADS * c + head * c + j, mask=j < c, other=0.0).to(tl.float32)
        line_sums += added[:, None]
    row = first + tl.arange(0, BLOCK)
    line_row, plane_row = _rows(head, HEADS, c, PIECE)
    target = out + (token + row)[None, :]
    whole_block = (first >= shift) & (first + BLOCK <= end)
    owned = (row >= shift) & (row < end)
    _write(target + line_row[:, None] * stride, line_sums, line_exists, owned, whole_block)
    _write(target + plane_row[:, None] * stride, plane_sums, plane_exists, owned, whole_block)


def _descriptors(
    qkv: torch.Tensor, m: int, piece: int, tokens: int
) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Boxes of lines and of planes."""
    length = qkv.shape[1]
    lines = TensorDescriptor(qkv, [4, 3 * m, length], [3 * m * length, length, 1], [4, piece, tokens])
    planes = TensorDescriptor(
        qkv[12 * m :], [2, 6 * m, length], [6 * m * length, length, 1], [2, 2 * piece, tokens]
    )
    return lines, planes


def attention_channels_first(
    qkv: torch.Tensor, bias: torch.Tensor | None, heads: int, number: int, length: int
) -> torch.Tensor:
    """Attention over qkv[3C, T], `number` sequences of this length, with the A1 bias[3C/8]: o[C, T].

    T is a multiple of eight; what comes after the last sequence is not used.
    """
    m = qkv.shape[0] // 24
    c = m // heads
    piece = triton.next_power_of_2(c)
    block, step, warps, stages = tile("attention", (8 * c, length), qkv.device, TILES[c])
    tail = max(16, triton.next_power_of_2(min(length % step + ALIGNMENT - 1, step)))
    out = torch.empty((8 * m, qkv.shape[1]), dtype=qkv.dtype, device=qkv.device)
    with torch.cuda.device_of(qkv):
        _attention_channels_first[(number * heads * triton.cdiv(length + ALIGNMENT - 1, block),)](
            *(box for tokens in (block, step, tail) for box in _descriptors(qkv, m, piece, tokens)),
            bias,
            out,
            out.shape[1],
            length,
            HEADS=heads,
            c=c,
            PIECE=piece,
            BLOCK=block,
            STEP=step,
            TAIL=tail,
            num_warps=warps,
            num_stages=stages,
        )
    return out
