"""Octic layer norm, alone and fused with the residual sum before it.

Each irrep component is centred over its own channels; then the token is divided by its root mean square over all
channels:  y = gain · (x − x̄) / √(mean((x − x̄)²) + ε) + shift.  `gain` has one value per irrep channel (3C/4 for
D8, the components of E share theirs), `shift` [C/|G|] acts on A1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from quickvit.group import D8, Layout
from quickvit.ops.backend import fused, needs_grad
from quickvit.ops.operator import fused_operator, kernels, seen, straight, written
from quickvit.ops.precision import product_dtype
from quickvit.ops.rows import Rows, flat, lines, require_length

# A branch, its bias, layer scale, factors, and tokens to a factor.
_NO_BRANCH = None, None, None, None, 1


def octic_layer_norm(
    x: Tensor, gain: Tensor, shift: Tensor, eps: float, layout: Layout, *, pair_weight: float = 1.0
) -> Tensor:
    """Layer norm of a packed tensor [..., C].

    `pair_weight` weighs the two-dimensional irreps in the mean square; 1 keeps unit variance at unit variance.
    """
    _require_channels(x, layout)
    if not fused(x, layout.group):
        return definition(x, gain, shift, eps, layout, pair_weight=pair_weight)
    require_length(layout.gains, gain=gain)
    require_length(layout.copies, shift=shift)
    y, _ = _norm(flat(x), *lines(gain, shift), eps, pair_weight, _output_dtype(x))
    return y.view(x.shape)


def octic_residual_norm(
    x: Tensor,
    branch: Tensor,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    layout: Layout,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    added: Rows | None = None,
    normed: Rows | None = None,
    pair_weight: float = 1.0,
    overwrite: bool = False,
) -> tuple[Tensor, Tensor]:
    """The residual sum and its norm: z = x + sample_scale · scale · (branch + bias), and layer_norm(z).

    Shapes: x and branch [B, N, C]; bias [C/|G|] on A1, left over from the linear map that made the branch; scale
    (layer scale) one value per irrep channel; sample_scale [B] (stochastic depth). Where samples are left out of
    branches, `added` are the tokens of x that this branch [n, C] is of, with sample_scale [n], and `normed` those
    whose norm [m, C] the next branch wants. With `overwrite` the caller has no more use for x and branch: on a GPU,
    where nobody looks, they hold the results.
    """
    if sample_scale is not None and sample_scale.shape != branch.shape[:1]:
        raise ValueError(
            f"expected a factor for each of the {branch.shape[0]} samples of the branch, got sample_scale "
            f"{tuple(sample_scale.shape)}"
        )
    _require_channels(x, layout)
    _require_channels(branch, layout)
    if added is None and branch.shape != x.shape:
        raise ValueError(f"expected a branch like x, {tuple(x.shape)}, got {tuple(branch.shape)}")
    some = added is not None or normed is not None
    # Nobody learns the factors of samples, so kernels have no gradient of them.
    if not fused(x, layout.group) or (some and x.is_cpu) or needs_grad(sample_scale):
        x = residual(x, branch, layout, bias=bias, scale=scale, sample_scale=sample_scale, added=added)
        y = x if normed is None else normed.of(flat(x))
        return x, octic_layer_norm(y, gain, shift, eps, layout, pair_weight=pair_weight)
    if added is not None and sample_scale is None:
        # Tokens without a branch get no bias either: they have no factor.
        sample_scale = branch.new_ones(branch.shape[0], dtype=torch.float32)
    require_length(layout.gains, gain=gain, scale=scale)
    require_length(layout.copies, shift=shift, bias=bias)
    gain, shift = gain.contiguous(), shift.contiguous()
    # Without tokens a factor would belong to none of them.
    bias, scale, sample_scale = lines(bias, scale, sample_scale if x.numel() else None)
    if overwrite and not some and _may_write(x, branch, gain, shift, bias, scale):
        tokens = _tokens_per_sample(flat(branch), sample_scale)
        rest = bias, scale, sample_scale, tokens, gain, shift, eps, branch.dtype, pair_weight
        _norm_into(flat(x), flat(branch), *rest)
        written(x, branch)
        return x, branch
    z, y, _ = _residual_norm(
        flat(x),
        flat(branch),
        bias,
        scale,
        sample_scale,
        None if added is None else added.place,
        None if normed is None else normed.place,
        flat(x).shape[0] if normed is None else normed.chosen.shape[0],
        gain,
        shift,
        eps,
        pair_weight,
        _output_dtype(x),
    )
    return z.view(x.shape), y.view(x.shape) if normed is None else y


def deviation(x: Tensor, eps: float, pair_weight: float) -> Tensor:
    """1/σ [T], what a norm multiplies tokens x [T, C] by; for operators that PyTorch does not look into."""
    if x.is_cuda:
        rstd: Tensor = kernels(x, "deviation").deviation(x.contiguous(), eps, pair_weight)
        return rstd
    layout = Layout(x.shape[1])
    dtype = torch.promote_types(x.dtype, torch.float32)
    return _reciprocal(_centre(x.to(dtype), layout), eps, layout, pair_weight)[:, 0]


def _may_write(x: Tensor, branch: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the sum can take the place of x, and its norm that of the branch.

    With gradients a checkpoint may have kept both, to compute from them again, even if they need none themselves.
    """
    if not x.is_cuda or torch.is_grad_enabled() or seen(x, branch, *parameters):
        return False
    alike = x.shape == branch.shape and branch.dtype == _output_dtype(x)
    return alike and x.is_contiguous() and branch.is_contiguous()


@straight
def _norm_into(x: Tensor, branch: Tensor, *rest: Any) -> None:
    kernels(x, "norm").residual_norm_forward(x, branch, *rest, into=(x, branch))


def _require_channels(x: Tensor, layout: Layout) -> None:
    if x.shape[-1] != layout.channels:
        raise ValueError(f"expected {layout.channels} channels, as the layout has, got {x.shape[-1]}")


def residual(
    x: Tensor,
    branch: Tensor,
    layout: Layout,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    added: Rows | None = None,
) -> Tensor:
    """z = x + sample_scale · scale · (branch + bias), of all tokens or of those that are `added`."""
    if bias is not None:
        branch = branch + layout.embed_invariant(bias)
    if sample_scale is not None:
        branch = branch * sample_scale.view(-1, *[1] * (branch.ndim - 1))
    if added is not None:
        branch = added.spread(branch).view(x.shape)
    total = x + branch if scale is None else torch.addcmul(x, branch.to(x.dtype), layout.expand(scale))
    return total.to(x.dtype)


def definition(
    x: Tensor, gain: Tensor, shift: Tensor, eps: float, layout: Layout, *, pair_weight: float = 1.0
) -> Tensor:
    """Layer norm in standard operators: the standard norm of the centred token."""
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    x = _centre(x, layout)
    gain = layout.expand(gain).to(x.dtype)
    shift = layout.embed_invariant(shift).to(x.dtype)
    if pair_weight == 1.0:
        # The centred blocks have mean zero together, so the standard norm finds nothing more to centre.
        y = functional.layer_norm(x, (layout.channels,), gain, shift, eps)
    else:
        y = x * _reciprocal(x, eps, layout, pair_weight) * gain + shift
    return y.to(dtype)


def _reciprocal(x: Tensor, eps: float, layout: Layout, pair_weight: float) -> Tensor:
    """1/√(mean of squares + ε) of a centred token."""
    weight = x.new_full((layout.channels,), pair_weight)
    weight[: layout.one_dim_channels] = 1
    return torch.rsqrt((weight * x.square()).mean(-1, keepdim=True) + eps)


def _centre(x: Tensor, layout: Layout) -> Tensor:
    """x − x̄ with the mean over the channels of each block."""
    order, n1 = layout.group.order, layout.group.num_one_dim
    parts = x.unflatten(-1, (order, layout.copies))
    mean = parts.mean(-1, keepdim=True)
    if n1 < order:
        # A block of a two-dimensional irrep spans two parts.
        pairs = mean[..., n1:, :].unflatten(-2, (-1, 2))
        pairs = pairs.mean(-2, keepdim=True).expand_as(pairs).flatten(-3, -2)
        mean = torch.cat([mean[..., :n1, :], pairs], dim=-2)
    return (parts - mean).flatten(-2)


def _output_dtype(x: Tensor) -> torch.dtype:
    """Under autocast the norm feeds a matrix product, so it writes that product's dtype."""
    return product_dtype(x.device) or x.dtype


@fused_operator("octic_layer_norm")
def _norm(
    x: Tensor, gain: Tensor, shift: Tensor, eps: float, pair_weight: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    _, y, statistics = kernels(x, "norm").residual_norm_forward(
        x.contiguous(), *_NO_BRANCH, gain, shift, eps, dtype, pair_weight
    )
    return y, statistics


@_norm.register_fake
def _(x, gain, shift, eps, pair_weight, dtype):
    return x.new_empty(x.shape, dtype=dtype), _fake_statistics(x)


@fused_operator("octic_layer_norm_grad")
def _norm_grad(
    grad: Tensor, x: Tensor, statistics: Tensor, gain: Tensor, pair_weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    dx, _, dgain, dshift, _, _ = kernels(x, "norm").residual_norm_backward(
        grad.contiguous(), None, x.contiguous(), statistics, gain, *_NO_BRANCH, pair_weight
    )
    return dx, dgain, dshift


@_norm_grad.register_fake
def _(grad, x, statistics, gain, pair_weight):
    return x.new_empty(x.shape), torch.empty_like(gain), gain.new_empty(x.shape[1] // D8.order)


def _norm_setup(ctx, inputs, output):
    x, gain, _, _, ctx.pair_weight, _ = inputs
    ctx.save_for_backward(x, gain, output[1])


def _norm_backward(ctx, grad, _):
    x, gain, statistics = ctx.saved_tensors
    return *_norm_grad(grad, x, statistics, gain, ctx.pair_weight), None, None, None


_norm.register_autograd(_norm_backward, setup_context=_norm_setup)


@fused_operator("octic_residual_norm")
def _residual_norm(
    x: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    sample_scale: Tensor | None,
    added: Tensor | None,
    normed: Tensor | None,
    rows: int,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    pair_weight: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    x, branch, tokens = x.contiguous(), branch.contiguous(), _tokens_per_sample(branch, sample_scale)
    options = {} if added is None and normed is None else {"added": added, "normed": normed, "rows": rows}
    return kernels(x, "norm").residual_norm_forward(
        x, branch, bias, scale, sample_scale, tokens, gain, shift, eps, dtype, pair_weight, **options
    )


@_residual_norm.register_fake
def _(x, branch, bias, scale, sample_scale, added, normed, rows, gain, shift, eps, pair_weight, dtype):
    return x.new_empty(x.shape), x.new_empty(rows, x.shape[1], dtype=dtype), _fake_statistics(x)


@fused_operator("octic_residual_norm_grad")
def _residual_norm_grad(
    grad: Tensor,
    grad_stream: Tensor,
    stream: Tensor,
    statistics: Tensor,
    gain: Tensor,
    branch: Tensor,
    bias: Tensor | None,
    scale: Tensor | None,
    sample_scale: Tensor | None,
    added: Tensor | None,
    normed: Tensor | None,
    pair_weight: float,
) -> list[Tensor]:
    options = {} if added is None and normed is None else {"added": added, "normed": normed}
    grads = kernels(stream, "norm").residual_norm_backward(
        grad.contiguous(),
        grad_stream.contiguous(),
        stream,
        statistics,
        gain,
        branch.contiguous(),
        bias,
        scale,
        sample_scale,
        _tokens_per_sample(branch, sample_scale),
        pair_weight,
        **options,
    )
    return [g for g in grads if g is not None]


@_residual_norm_grad.register_fake
def _(
    grad,
    grad_stream,
    stream,
    statistics,
    gain,
    branch,
    bias,
    scale,
    sample_scale,
    added,
    normed,
    pair_weight,
):
    shift = gain.new_empty(stream.shape[1] // D8.order)
    optional = [torch.empty_like(t) for t in (scale, bias) if t is not None]
    return [
        stream.new_empty(stream.shape),
        branch.new_empty(branch.shape),
        torch.empty_like(gain),
        shift,
        *optional,
    ]


def _residual_setup(ctx, inputs, output):
    _, branch, *maps, _, gain, _, _, ctx.pair_weight, _ = inputs
    stream, _, statistics = output
    ctx.save_for_backward(stream, statistics, gain, branch, *maps)


def _residual_backward(ctx, grad_stream, grad, _):
    stream, statistics, gain, branch, bias, scale, *rest = ctx.saved_tensors
    grads = _residual_norm_grad(
        grad, grad_stream, stream, statistics, gain, branch, bias, scale, *rest, ctx.pair_weight
    )
    grad_x, grad_branch, grad_gain, grad_shift, *optional = grads
    grad_scale = None if scale is None else optional.pop(0)
    grad_bias = None if bias is None else optional.pop(0)
    of_tensors = grad_x, grad_branch, grad_bias, grad_scale
    return *of_tensors, None, None, None, None, grad_gain, grad_shift, None, None, None


_residual_norm.register_autograd(_residual_backward, setup_context=_residual_setup)


def _tokens_per_sample(x: Tensor, sample_scale: Tensor | None) -> int:
    return 1 if sample_scale is None else max(1, x.shape[0] // max(1, sample_scale.shape[0]))


def _fake_statistics(x: Tensor) -> Tensor:
    # The mean of each of the six blocks, and the reciprocal of the standard deviation.
    return x.new_empty(x.shape[0], 7, dtype=torch.float32)
