"""Multi-head self-attention on packed channels.

qkv [B, N, 3C] is the packed result of an octic linear map; in each of its blocks the channels run over
(q k v, head, channel). A head of size D = C/H collects its channels of all blocks, so that every head holds a
multiple of ρ_iso and its logits are invariant.

Sequences of several lengths come packed too, see `packing`. Operators read and write tokens [T, ...] and are told
the shapes as two lists: each batch has its place in the one result, and in the one gradient, and nothing is copied.
"""

from __future__ import annotations

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

# Entries of x from which on `octic_self_attention` is taken: those of 42 images at L/16.
SELF_ATTENTION_ENTRIES = 2**23


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
    if not dropout and _fits_whole_heads(qkv, bias, heads, max(lengths)):
        return _whole_heads(qkv, bias, heads, numbers, lengths)
    limit = 0 if dropout else _short(qkv, heads)
    features = iter(_split_heads(qkv, bias, heads, numbers, lengths, limit))
    results = []
    for length in lengths:
        first = next(features)
        short = length <= limit
        results.append(first if short else attend(first, next(features), next(features), dropout=dropout))
    return _merge_heads(results)


def takes_self_attention(x: Tensor, heads: int, group: DihedralGroup) -> bool:
    """Whether `octic_self_attention` is there for x: where a kernel writes q, k, v the way attention reads best.

    That is for heads of 64, and for so many features that launching it, which takes Python longer, matters little.
    """
    channels = x.shape[-1]
    if not fused(x, group) or channels != 64 * heads or not hopper.takes(x, 3 * channels):
        return False
    # Which is not asked of an exported model: it would be for as many images as its example.
    return not torch.compiler.is_exporting() and x.numel() >= SELF_ATTENTION_ENTRIES


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


def _short(qkv: Tensor, heads: int) -> int:
    """Up to how many tokens sequences are taken by a kernel that keeps a whole head and has gradients."""
    from quickvit.ops.triton.whole_head import SHORT, takes

    fits = qkv.element_size() == 2 and takes(SHORT, qkv.shape[-1] // (3 * heads), qkv.device)
    return SHORT if fits else 0


@open_operator("octic_split_heads")
def _split_heads(
    qkv: Tensor, bias: Tensor | None, heads: int, numbers: list[int], lengths: list[int], limit: int
) -> list[Tensor]:
    """Of each batch in turn q, k and v [B, N, H, D]; of those up to `limit` tokens long the result [B N, C]."""
    from quickvit.ops.triton.heads import to_heads
    from quickvit.ops.triton.whole_head import attention_of_batch

    qkv = qkv.contiguous()
    features: list[Tensor] = []
    origin = 0
    for number, length in _shapes(numbers, lengths):
        if length <= limit:
            features.append(attention_of_batch(qkv, bias, heads, (number, length), origin))
        else:
            features += to_heads(qkv, heads, 3, bias, (number, length), origin)
        origin += number * length
    return features


@_split_heads.register_fake
def _(qkv, bias, heads, numbers, lengths, limit):
    features = []
    for number, length in _shapes(numbers, lengths):
        if length <= limit:
            features.append(qkv.new_empty(number * length, qkv.shape[1] // 3))
        else:
            size = number, length, heads, qkv.shape[1] // (3 * heads)
            features += [qkv.new_empty(size) for _ in range(3)]
    return features


@open_operator("octic_split_heads_grad")
def _split_heads_grad(
    features: list[Tensor],
    qkv: Tensor | None,
    bias: Tensor | None,
    heads: int,
    channels: int,
    lengths: list[int],
) -> Tensor:
    """The gradient of qkv [T, 3C] from those of the features, of which short batches have one and others three."""
    from quickvit.ops.triton.heads import to_packed
    from quickvit.ops.triton.whole_head import gradient_of_batch

    left = [x.contiguous() for x in features]
    tokens = _tokens(features, 3)
    grad = torch.empty((tokens, 3 * channels), dtype=left[0].dtype, device=left[0].device)
    origin = 0
    for length in lengths:
        if left[0].ndim == 2:
            rows = left.pop(0)
            shape = len(rows) // max(length, 1), length
            assert qkv is not None
            gradient_of_batch(rows, qkv.contiguous(), bias, grad, heads, shape, origin)
            origin += len(rows)
        else:
            batch, left = left[:3], left[3:]
            to_packed(batch, grad, origin)
            origin += batch[0].shape[0] * batch[0].shape[1]
    return grad


@_split_heads_grad.register_fake
def _(features, qkv, bias, heads, channels, lengths):
    return features[0].new_empty(_tokens(features, 3), 3 * channels)


def _split_setup(ctx, inputs, output):
    qkv, bias, ctx.heads, _, ctx.lengths, limit = inputs
    ctx.channels = qkv.shape[1] // 3
    # Only the gradients of short batches ask what q, k and v were.
    short = any(length <= limit for length in ctx.lengths)
    ctx.save_for_backward(*((qkv, bias) if short else (None, None)))
    ctx.bias_width = None if bias is None else bias.shape[0]


def _split_backward(ctx, features):
    grad = _split_heads_grad(features, *ctx.saved_tensors, ctx.heads, ctx.channels, ctx.lengths)
    grad_bias = grad[:, : ctx.bias_width].sum(0) if ctx.needs_input_grad[1] else None
    return grad, grad_bias, None, None, None, None


_split_heads.register_autograd(_split_backward, setup_context=_split_setup)


@open_operator("octic_merge_heads")
def _merge_heads(results: list[Tensor]) -> Tensor:
    """The results of all batches, [B, N, H, D] or packed already [B N, C], as packed channels."""
    from quickvit.ops.triton.heads import copy_rows, to_packed

    x = results[0]
    out = torch.empty((_tokens(results, 1), _channels(x)), dtype=x.dtype, device=x.device)
    origin = 0
    for result in results:
        if result.ndim == 2:
            copy_rows(result.contiguous(), out, origin)
        else:
            to_packed([result.contiguous()], out, origin)
        origin += _tokens([result], 1)
    return out


@_merge_heads.register_fake
def _(results):
    return results[0].new_empty(_tokens(results, 1), _channels(results[0]))


@open_operator("octic_merge_heads_grad")
def _merge_heads_grad(grad: Tensor, heads: int, number: int, length: int) -> Tensor:
    """The gradient of a batch's result, packed [B N, C], in heads [B, N, H, D]."""
    from quickvit.ops.triton.heads import to_heads

    return to_heads(grad.contiguous(), heads, 1, None, (number, length), 0)[0]


@_merge_heads_grad.register_fake
def _(grad, heads, number, length):
    return grad.new_empty(number, length, heads, grad.shape[1] // heads)


def _merge_setup(ctx, inputs, output):
    (results,) = inputs
    ctx.shapes = [tuple(x.shape) for x in results]


def _merge_backward(ctx, grad):
    packed = [shape[0] if len(shape) == 2 else shape[0] * shape[1] for shape in ctx.shapes]
    parts = zip(grad.split(packed), ctx.shapes, strict=True)
    return [x if len(shape) == 2 else _merge_heads_grad(x, shape[2], *shape[:2]) for x, shape in parts]


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


def _tokens(features: list[Tensor], parts: int) -> int:
    """How many tokens batches have, of `parts` features [B, N, H, D] each, or one [B N, C]."""
    heads = sum(x.shape[0] * x.shape[1] for x in features if x.ndim == 4)
    return heads // parts + sum(x.shape[0] for x in features if x.ndim == 2)


def _channels(x: Tensor) -> int:
    return x.shape[1] if x.ndim == 2 else x.shape[2] * x.shape[3]


_ops = torch.ops.quickvit


@register_flop_formula([_ops.octic_attention, _ops.octic_attention_cpu, _ops.octic_whole_heads])
def _attention_flops(qkv, bias, heads, numbers, lengths, **__):
    return 4 * _pairs(numbers, lengths) * (qkv[1] // 3)


@register_flop_formula(_ops.octic_split_heads)
def _split_heads_flops(qkv, bias, heads, numbers, lengths, limit, **__):
    short = [(number, length) for number, length in _shapes(numbers, lengths) if length <= limit]
    return 4 * sum(number * length**2 for number, length in short) * (qkv[1] // 3)


@register_flop_formula(_ops.octic_split_heads_grad)
def _split_heads_grad_flops(features, qkv, bias, heads, channels, lengths, **__):
    left, pairs = [*features], 0
    for length in lengths:
        first = left[0]
        if len(first) == 2:
            pairs += first[0] * length
        del left[: 1 if len(first) == 2 else 3]
    return 10 * pairs * channels


@register_flop_formula(_ops.octic_self_attention)
def _self_attention_flops(x, weight_1, weight_2, bias, heads, numbers, lengths, **__):
    _, rows, columns = weight_1
    return 2 * x[0] * 12 * rows * columns + 4 * _pairs(numbers, lengths) * x[1]


@register_flop_formula(_ops.octic_self_attention_qkv_grad)
def _qkv_grad_flops(grad, qkv, out, lse, heads, numbers, lengths, **__):
    return 10 * _pairs(numbers, lengths) * grad[1]


@register_flop_formula([_ops.octic_attention_grad, _ops.octic_attention_grad_cpu])
def _attention_grad_flops(grad, qkv, bias, out, lse, heads, numbers, lengths, **__):
    return 10 * _pairs(numbers, lengths) * grad[1]


def _pairs(numbers: list[int], lengths: list[int]) -> int:
    """Pairs of a query and a key."""
    return sum(number * length**2 for number, length in _shapes(numbers, lengths))
