"""Octic layer norm, alone and fused with the residual sum before it.

Each irrep component is centred over its own channels; then the token is divided by its root mean square over all
channels:  y = gain · (x − x̄) / √(mean((x − x̄)²) + ε) + shift.  `gain` has one value per irrep channel (3C/4 for
D8, the components of E share theirs), `shift` [C/|G|] acts on A1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from quickvit.group import D8, DihedralGroup, Layout
from quickvit.ops.backend import fused


def octic_layer_norm(
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    *,
    pair_weight: float = 1.0,
    group: DihedralGroup = D8,
) -> Tensor:
    """Layer norm of a packed tensor [..., C].

    `pair_weight` weighs the two-dimensional irreps in the mean square; 1 keeps unit variance at unit variance.
    """
    if not fused(x, group):
        return definition(x, gain, shift, eps, pair_weight=pair_weight, group=group)
    y, _ = _norm(x.flatten(0, -2), gain.float(), shift.float(), eps, pair_weight, _output_dtype(x))
    return y.view(x.shape)


def octic_residual_norm(
    x: Tensor,
    branch: Tensor,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    pair_weight: float = 1.0,
    group: DihedralGroup = D8,
) -> tuple[Tensor, Tensor]:
    """The residual sum and its norm: z = x + sample_scale · scale · (branch + bias), and layer_norm(z).

    Shapes: x and branch [B, N, C]; bias [C/|G|] on A1, left over from the linear map that made the branch; scale
    (layer scale) one value per irrep channel; sample_scale [B] (stochastic depth).
    """
    if not fused(x, group):
        x = residual(x, branch, bias=bias, scale=scale, sample_scale=sample_scale, group=group)
        return x, definition(x, gain, shift, eps, pair_weight=pair_weight, group=group)
    z, y, _ = _residual_norm(
        x.flatten(0, -2),
        branch.flatten(0, -2),
        None if bias is None else bias.float(),
        None if scale is None else scale.float(),
        None if sample_scale is None else sample_scale.float(),
        gain.float(),
        shift.float(),
        eps,
        pair_weight,
        _output_dtype(x),
    )
    return z.view(x.shape), y.view(x.shape)


def residual(
    x: Tensor,
    branch: Tensor,
    *,
    bias: Tensor | None = None,
    scale: Tensor | None = None,
    sample_scale: Tensor | None = None,
    group: DihedralGroup = D8,
) -> Tensor:
    """z = x + sample_scale · scale · (branch + bias)."""
    layout = Layout(x.shape[-1], group)
    if bias is not None:
        branch = branch + layout.embed_invariant(bias)
    if sample_scale is not None:
        branch = branch * sample_scale.view(-1, *[1] * (x.ndim - 1))
    return x + branch if scale is None else torch.addcmul(x, branch.to(x.dtype), layout.expand(scale))


def definition(
    x: Tensor,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    *,
    pair_weight: float = 1.0,
    group: DihedralGroup = D8,
) -> Tensor:
    """Layer norm in standard operators: the root-mean-square norm of the centred token."""
    layout = Layout(x.shape[-1], group)
    dtype = x.dtype
    if dtype in (torch.float16, torch.bfloat16):
        x = x.float()
    x = _centre(x, layout)
    gain = layout.expand(gain).to(x.dtype)
    if pair_weight == 1.0:
        y = functional.rms_norm(x, (layout.channels,), gain, eps)
    else:
        weight = x.new_full((layout.channels,), pair_weight)
        weight[: layout.one_dim_channels] = 1
        y = x * torch.rsqrt((weight * x.square()).mean(-1, keepdim=True) + eps) * gain
    return (y + layout.embed_invariant(shift)).to(dtype)


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
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
