"""Multi-head self-attention on packed channels.

qkv [B, N, 3C] is the packed result of an octic linear map; in each of its blocks the channels run over
(q k v, head, channel). A head of size D = C/H collects its channels of all blocks, so that every head holds a
multiple of ρ_iso and its logits are invariant.

Sequences of several lengths come packed too, see `packing`. Operators read and write tokens [T, ...] and are told
the shapes as two lists: each batch has its place in the one result, and in the one gradient, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quickvit.group import D8, DihedralGroup, Layout
from quickvit.ops import hopper
from quickvit.ops.backend import fused, needs_grad
from quickvit.ops.linear import all_grads
from quickvit.ops.operator import closed_operator, fused_operator, kernels, open_operator
from quickvit.ops.packing import Shapes, attend, pack, unpack
from quickvit.ops.precision import autocast

# Entries of a feature from which on kernels are taken that Python needs long to launch: those of 42 images at L/16.
MANY_ENTRIES = 2**23


def octic_attention(
    qkv: Tensor,
    heads: int,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    shapes: Shapes | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(q kᵀ / √D) v for every head, [B, N, 3C] → [B, N, C]; `bias` [3C/|G|] is added to A1 first.

    `layout` is that of qkv. Packed sequences [T, 3C] → [T, C] come with their `shapes`.
    """
    if shapes is None:
        batch = qkv.shape[0], qkv.shape[1]
        flat = octic_attention(qkv.flatten(0, 1), heads, layout, bias, shapes=(batch,), dropout=dropout)
        return flat.unflatten(0, batch)
    if sum(number * length for number, length in shapes) != qkv.shape[0]:
        raise ValueError(f"sequences of shapes {shapes} do not make the {qkv.shape[0]} tokens that there are")
    if not fused(qkv, layout.group) or (dropout and qkv.is_cpu):
        return definition(qkv, heads, layout, bias, shapes=shapes, dropout=dropout)
    numbers, lengths = ([*sizes] for sizes in zip(*shapes, strict=True))
    if not dropout and _reads_packed(qkv, heads):
        return _attention(qkv, bias, heads, numbers, lengths)[0]
    if not dropout and _takes_heads(qkv, heads, max(lengths)):
        return _head_attention(qkv, bias, heads, numbers, lengths)[0]
    if not dropout and _fits_whole_heads(qkv, bias, heads, max(lengths)):
        return _whole_heads(qkv, bias, heads, numbers, lengths)
    features = _split_heads(qkv, bias, heads, numbers, lengths)
    batches = zip(features[::3], features[1::3], features[2::3], strict=True)
    return _merge_heads([attend(q, k, v, dropout=dropout) for q, k, v in batches])


def takes_self_attention(x: Tensor, heads: int, group: DihedralGroup) -> bool:
    """Whether `octic_self_attention` is there for x: where a kernel writes q, k, v the way attention reads best.

    That is for heads of 64, and for so many features that launching it, which takes Python longer, matters little.
    """
    channels = x.shape[-1]
    if not fused(x, group) or channels != 64 * heads or not hopper.takes(x, 3 * channels):
        return False
    return _are_many(x.numel())


def octic_self_attention(
    x: Tensor,
    weight_1: Tensor,
    weight_2: Tensor,
    bias: Tensor | None,
    heads: int,
    *,
    shapes: Shapes | None = None,
) -> Tensor:
    """`octic_attention` of W x with a bias, [B, N, C] → [B, N, C]; see `octic_linear`."""
    x, weight_1, weight_2 = autocast(x, weight_1, weight_2)
    numbers, lengths = ([*sizes] for sizes in zip(*(shapes or (x.shape[:2],)), strict=True))
    out: Tensor = _self_attention(x.flatten(0, -2), weight_1, weight_2, bias, heads, numbers, lengths)[0]
    return out.unflatten(0, x.shape[:-1])


def definition(
    qkv: Tensor,
    heads: int,
    layout: Layout,
    bias: Tensor | None = None,
    *,
    shapes: Shapes,
    dropout: float = 0.0,
) -> Tensor:
    """The same with `scaled_dot_product_attention`, the channels copied into heads and back."""
    blocks = qkv.split([block.width for block in layout.blocks], dim=-1)
    pieces = [block.unflatten(-1, (3, heads, -1)) for block in blocks]
    if bias is not None:
        pieces[0] = pieces[0] + bias.unflatten(0, (3, heads, -1))
    batches = unpack(torch.cat(pieces, dim=-1), shapes)
    out, _ = pack([attend(*batch.permute(2, 0, 1, 3, 4), dropout=dropout) for batch in batches])
    parts = out.split([piece.shape[-1] for piece in pieces], dim=-1)
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)


def _reads_packed(qkv: Tensor, heads: int) -> bool:
    """Whether a kernel that reads packed channels takes these heads: on a GPU, pieces of 16 or 32 bytes, aligned."""
    if qkv.is_cpu:
        return True
    return qkv.element_size() == 2 and qkv.shape[-1] // (3 * D8.order * heads) in (8, 16)


def _takes_heads(qkv: Tensor, heads: int, longest: int) -> bool:
    """Whether the kernels for Hopper take these heads; as for `takes_self_attention`, if there are many features."""
    dim = qkv.shape[-1] // (3 * heads)
    return _are_many(qkv.numel() // 3) and hopper.takes_attention(qkv, dim, longest)


def _are_many(entries: int) -> bool:
    # Which is not asked of an exported model: it would be for as many images as its example.
    return not _is_exporting() and entries >= MANY_ENTRIES


@torch.compiler.assume_constant_result
def _is_exporting() -> bool:
    """PyTorch's own word, asked outside of its compiler: that of 2.11 says yes whatever it compiles for."""
    return torch.compiler.is_exporting()


def _fits_whole_heads(qkv: Tensor, bias: Tensor | None, heads: int, longest: int) -> bool:
    """Whether the kernel that keeps a head's keys and values takes these; it has no gradient."""
    from quickvit.ops.triton.whole_head import takes

    dim = qkv.shape[-1] // (3 * heads)
    return qkv.element_size() == 2 and not needs_grad(qkv, bias) and takes(longest, dim, qkv.device)


@open_operator("octic_whole_heads")
def _whole_heads(
    qkv: Tensor, bias: Tensor | None, heads: int, numbers: list[int], lengths: list[int]
) -> Tensor:
    from quickvit.ops.triton.whole_head import attention_whole_head

    return attention_whole_head(qkv.contiguous(), bias, heads, _shapes(numbers, lengths))


@open_operator("octic_split_heads")
def _split_heads(
    qkv: Tensor, bias: Tensor | None, heads: int, numbers: list[int], lengths: list[int]
) -> list[Tensor]:
    """q, k and v [B, N, H, D] of each batch in turn."""
    from quickvit.ops.triton.heads import to_heads

    qkv = qkv.contiguous()
    batches = _batches(numbers, lengths)
    return [x for origin, shape in batches for x in to_heads(qkv, heads, 3, bias, shape, origin)]


@_split_heads.register_fake
def _(qkv, bias, heads, numbers, lengths):
    return _new_heads(qkv, heads, 3, numbers, lengths)


def _to_packed(features: list[Tensor], parts: int) -> Tensor:
    """`parts` features [B, N, H, D] of each batch in turn as packed channels."""
    from quickvit.ops.triton.heads import to_packed

    packed = _new_packed(features, parts)
    origin = 0
    for first in range(0, len(features), parts):
        batch = [x.contiguous() for x in features[first : first + parts]]
        to_packed(batch, packed, origin)
        origin += batch[0].shape[0] * batch[0].shape[1]
    return packed


@open_operator("octic_split_heads_grad")
def _split_heads_grad(features: list[Tensor]) -> Tensor:
    return _to_packed(features, 3)


@_split_heads_grad.register_fake
def _(features):
    return _new_packed(features, 3)


def _split_setup(ctx, inputs, output):
    _, bias, *_ = inputs
    ctx.bias_width = None if bias is None else bias.shape[0]


def _split_backward(ctx, features):
    grad = _split_heads_grad(features)
    grad_bias = grad[:, : ctx.bias_width].sum(0) if ctx.needs_input_grad[1] else None
    return grad, grad_bias, None, None, None


_split_heads.register_autograd(_split_backward, setup_context=_split_setup)


@open_operator("octic_merge_heads")
def _merge_heads(features: list[Tensor]) -> Tensor:
    """The results [B, N, H, D] of all batches as packed channels."""
    return _to_packed(features, 1)


@_merge_heads.register_fake
def _(features):
    return _new_packed(features, 1)


@open_operator("octic_merge_heads_grad")
def _merge_heads_grad(grad: Tensor, heads: int, numbers: list[int], lengths: list[int]) -> list[Tensor]:
    from quickvit.ops.triton.heads import to_heads

    grad = grad.contiguous()
    batches = _batches(numbers, lengths)
    return [to_heads(grad, heads, 1, None, shape, origin)[0] for origin, shape in batches]


@_merge_heads_grad.register_fake
def _(grad, heads, numbers, lengths):
    return _new_heads(grad, heads, 1, numbers, lengths)


def _merge_setup(ctx, inputs, output):
    (features,) = inputs
    ctx.heads = features[0].shape[2]
    ctx.numbers, ctx.lengths = [x.shape[0] for x in features], [x.shape[1] for x in features]


def _merge_backward(ctx, grad):
    return _merge_heads_grad(grad, ctx.heads, ctx.numbers, ctx.lengths)


_merge_heads.register_autograd(_merge_backward, setup_context=_merge_setup)


@fused_operator("octic_attention")
def _attention(
    qkv: Tensor, bias: Tensor | None, heads: int, numbers: list[int], lengths: list[int]
) -> tuple[Tensor, Tensor]:
    shapes = _shapes(numbers, lengths)
    return kernels(qkv, "attention").attention_forward(qkv.contiguous(), bias, heads, shapes)


@_attention.register_fake
def _(qkv, bias, heads, numbers, lengths):
    tokens, channels = qkv.shape
    lse = qkv.new_empty(tokens * heads, dtype=torch.float32)
    return qkv.new_empty(tokens, channels // 3), lse


@fused_operator("octic_attention_grad")
def _attention_grad(
    grad: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    out: Tensor,
    lse: Tensor,
    heads: int,
    numbers: list[int],
    lengths: list[int],
) -> Tensor:
    shapes = _shapes(numbers, lengths)
    return kernels(qkv, "attention").attention_backward(
        grad.contiguous(), qkv.contiguous(), bias, out, lse, heads, shapes
    )


@_attention_grad.register_fake
def _(grad, qkv, bias, out, lse, heads, numbers, lengths):
    return qkv.new_empty(qkv.shape)


def _setup(ctx, inputs, output):
    qkv, bias, *ctx.sizes = inputs
    ctx.save_for_backward(qkv, bias, *output)


def _backward(ctx, grad, _):
    qkv, bias, out, lse = ctx.saved_tensors
    grad_qkv = _attention_grad(grad, qkv, bias, out, lse, *ctx.sizes)
    grad_bias = grad_qkv[:, : bias.shape[0]].sum(0) if ctx.needs_input_grad[1] else None
    return grad_qkv, grad_bias, None, None, None


_attention.register_autograd(_backward, setup_context=_setup)


# ---------------------------------------------------------------------- a whole head at a time, on Hopper


@closed_operator("octic_head_attention")
def _head_attention(
    qkv: Tensor, bias: Tensor | None, heads: int, numbers: list[int], lengths: list[int]
) -> list[Tensor]:
    """The result, and for the gradients of each long batch q, k, v [B, N, H, D] and logarithms of sums [B, H, N]."""
    from quickvit.ops.triton.heads import to_heads
    from quickvit.ops.triton.whole_head import SHORT, attention_of_batch

    qkv = qkv.contiguous()
    out = qkv.new_empty(qkv.shape[0], qkv.shape[1] // 3)
    kept = []
    for origin, shape in _batches(numbers, lengths):
        if shape[1] <= SHORT:
            attention_of_batch(qkv, bias, out, heads, shape, origin)
        else:
            features = to_heads(qkv, heads, 3, bias, shape, origin)
            kept += [*features, hopper.attention_kernels().attention_forward(*features, out, origin)]
    return [out, *kept]


@_head_attention.register_fake
def _(qkv, bias, heads, numbers, lengths):
    from quickvit.ops.triton.whole_head import SHORT

    channels = qkv.shape[1] // 3
    kept = []
    for number, length in _shapes(numbers, lengths):
        if length > SHORT:
            kept += [qkv.new_empty(number, length, heads, channels // heads) for _ in range(3)]
            kept.append(qkv.new_empty(number, heads, length, dtype=torch.float32))
    return [qkv.new_empty(qkv.shape[0], channels), *kept]


@closed_operator("octic_head_attention_grad")
def _head_attention_grad(
    grad: Tensor,
    out: Tensor,
    kept: list[Tensor],
    qkv: Tensor | None,
    bias: Tensor | None,
    heads: int,
    numbers: list[int],
    lengths: list[int],
) -> Tensor:
    """The gradient of qkv, which short batches ask for once more."""
    from quickvit.ops.triton.heads import to_heads
    from quickvit.ops.triton.whole_head import SHORT, gradient_of_batch

    grad = grad.contiguous()
    grad_qkv = grad.new_empty(grad.shape[0], 3 * grad.shape[1])
    left = iter(kept)
    for origin, shape in _batches(numbers, lengths):
        if shape[1] <= SHORT:
            assert qkv is not None
            gradient_of_batch(grad, qkv.contiguous(), bias, grad_qkv, heads, shape, origin)
        else:
            q, k, v, logs = (next(left) for _ in range(4))
            (dout,) = to_heads(grad, heads, 1, None, shape, origin)
            kernels = hopper.attention_kernels()
            kernels.attention_backward(dout, q, k, v, out, logs, grad_qkv, origin)
    return grad_qkv


@_head_attention_grad.register_fake
def _(grad, out, kept, qkv, bias, heads, numbers, lengths):
    return grad.new_empty(grad.shape[0], 3 * grad.shape[1])


def _head_setup(ctx, inputs, output):
    from quickvit.ops.triton.whole_head import SHORT

    qkv, bias, heads, numbers, lengths = inputs
    ctx.sizes = heads, numbers, lengths
    short = min(lengths) <= SHORT
    ctx.save_for_backward(*((qkv, bias) if short else (None, None)), *output)
    ctx.set_materialize_grads(False)
    ctx.bias_width = None if bias is None else bias.shape[0]


def _head_backward(ctx, grads):
    qkv, bias, out, *kept = ctx.saved_tensors
    grad = _head_attention_grad(grads[0], out, kept, qkv, bias, *ctx.sizes)
    grad_bias = grad[:, : ctx.bias_width].sum(0) if ctx.needs_input_grad[1] else None
    return grad, grad_bias, None, None, None


_head_attention.register_autograd(_head_backward, setup_context=_head_setup)


# ---------------------------------------------------------------------- with the linear map


@closed_operator("octic_self_attention")
def _self_attention(
    x: Tensor,
    weight_1: Tensor,
    weight_2: Tensor,
    bias: Tensor | None,
    heads: int,
    numbers: list[int],
    lengths: list[int],
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and for the gradients q, k and v in runs and the log-sum-exp of the scores."""
    from quickvit.ops.triton.attention import attention_forward

    piece = x.shape[1] // (D8.order * heads)
    qkv = hopper.kernels().linear_heads(x, weight_1, weight_2, bias, piece)
    out, lse = attention_forward(qkv, None, heads, _shapes(numbers, lengths), runs=True)
    return out, qkv, lse


@_self_attention.register_fake
def _(x, weight_1, weight_2, bias, heads, numbers, lengths):
    tokens, channels = x.shape
    lse = x.new_empty(tokens * heads, dtype=torch.float32)
    return x.new_empty(tokens, channels), x.new_empty(tokens, 3 * channels), lse


@closed_operator("octic_self_attention_qkv_grad")
def _qkv_grad(
    grad: Tensor, qkv: Tensor, out: Tensor, lse: Tensor, heads: int, numbers: list[int], lengths: list[int]
) -> Tensor:
    """The gradient of q, k and v, packed."""
    from quickvit.ops.triton.attention import attention_backward

    shapes = _shapes(numbers, lengths)
    return attention_backward(grad.contiguous(), qkv, None, out, lse, heads, shapes, runs=True)


@_qkv_grad.register_fake
def _(grad, qkv, out, lse, heads, numbers, lengths):
    return torch.empty_like(qkv)


def _self_setup(ctx, inputs, output):
    x, weight_1, weight_2, bias, *ctx.sizes = inputs
    out, qkv, lse = output
    ctx.save_for_backward(x, weight_1, weight_2, out, qkv, lse)
    ctx.mark_non_differentiable(qkv, lse)
    ctx.set_materialize_grads(False)
    ctx.bias_dtype = x.dtype if bias is None else bias.dtype


def _self_backward(ctx, grad, *_):
    x, weight_1, weight_2, out, qkv, lse = ctx.saved_tensors
    grad_qkv = _qkv_grad(grad, qkv, out, lse, *ctx.sizes)
    grads = all_grads(ctx.needs_input_grad, grad_qkv, x, weight_1, weight_2, ctx.bias_dtype)
    return *grads, None, None, None


_self_attention.register_autograd(_self_backward, setup_context=_self_setup)


def _shapes(numbers: list[int], lengths: list[int]) -> Shapes:
    return tuple(zip(numbers, lengths, strict=True))


def _batches(numbers: list[int], lengths: list[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """The first token and the shape of each batch."""
    origin = 0
    for number, length in _shapes(numbers, lengths):
        yield origin, (number, length)
        origin += number * length


def _new_heads(packed, heads, parts, numbers, lengths):
    dim = packed.shape[1] // (parts * heads)
    shapes = _shapes(numbers, lengths)
    return [packed.new_empty(*shape, heads, dim) for shape in shapes for _ in range(parts)]


def _new_packed(features: list[Tensor], parts: int) -> Tensor:
    tokens = sum(x.shape[0] * x.shape[1] for x in features) // parts
    return features[0].new_empty(tokens, parts * features[0].shape[2] * features[0].shape[3])


_ops = torch.ops.quickvit


@register_flop_formula(
    [_ops.octic_attention, _ops.octic_attention_cpu, _ops.octic_whole_heads, _ops.octic_head_attention]
)
def _attention_flops(qkv, bias, heads, numbers, lengths, **__):
    return 4 * _pairs(numbers, lengths) * (qkv[1] // 3)


@register_flop_formula(_ops.octic_self_attention)
def _self_attention_flops(x, weight_1, weight_2, bias, heads, numbers, lengths, **__):
    _, rows, columns = weight_1
    return 2 * x[0] * 12 * rows * columns + 4 * _pairs(numbers, lengths) * x[1]


@register_flop_formula(_ops.octic_self_attention_qkv_grad)
def _qkv_grad_flops(grad, qkv, out, lse, heads, numbers, lengths, **__):
    return 10 * _pairs(numbers, lengths) * grad[1]


@register_flop_formula(_ops.octic_head_attention_grad)
def _head_attention_grad_flops(grad, out, kept, qkv, bias, heads, numbers, lengths, **__):
    return 10 * _pairs(numbers, lengths) * grad[1]


@register_flop_formula([_ops.octic_attention_grad, _ops.octic_attention_grad_cpu])
def _attention_grad_flops(grad, qkv, bias, out, lse, heads, numbers, lengths, **__):
    return 10 * _pairs(numbers, lengths) * grad[1]


def _pairs(numbers: list[int], lengths: list[int]) -> int:
    """Pairs of a query and a key."""
    return sum(number * length**2 for number, length in _shapes(numbers, lengths))
