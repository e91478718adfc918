"""Octic layer norm, alone and with the residual sum before it, see norm.c."""

from __future__ import annotations

import torch
from torch import Tensor

from quickvit.ops.cpu.library import call, checked, size

# Of a token: the mean of each of the six blocks, and the reciprocal of the standard deviation.
STATISTICS = 7


def residual_norm_forward(
    x: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    sample_scale: Tensor | None,
    tokens_per_sample: int,
    gain: Tensor,
    shift: Tensor,
    eps: float,
    dtype: torch.dtype,
    pair_weight: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """stream = x + sample_scale · scale · (branch + bias e_A1), y = norm(stream), statistics[T, 7]."""
    if dtype != torch.float32:
        raise ValueError(f"the kernel writes single precision, not {dtype}")
    tokens, copies = x.shape[0], x.shape[1] // 8
    stream = x if branch is None else torch.empty_like(x)
    y, statistics = torch.empty_like(x), x.new_empty(tokens, STATISTICS)
    call(
        "norm_forward",
        x,
        checked(branch, *x.shape),
        checked(bias, copies),
        checked(scale, 6 * copies),
        checked(sample_scale, tokens // tokens_per_sample),
        checked(gain, 6 * copies),
        checked(shift, copies),
        stream,
        y,
        statistics,
        float(eps),
        float(pair_weight),
        tokens,
        tokens_per_sample,
        copies,
    )
    return stream, y, statistics


def residual_norm_backward(
    dy: Tensor,
    dstream: Tensor | None,
    stream: Tensor,
    statistics: Tensor,
    gain: Tensor,
    branch: Tensor | None,
    bias: Tensor | None,
    scale: Tensor | None,
    sample_scale: Tensor | None,
    tokens_per_sample: int,
    pair_weight: float,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of `residual_norm_forward`: dx, dbranch, dgain, dshift, dscale, dbias; None for what is not there."""
    tokens, copies = stream.shape[0], stream.shape[1] // 8
    dx = torch.empty_like(stream)
    dbranch = None if branch is None else torch.empty_like(stream)
    sums = stream.new_empty(size("norm_items", tokens), 14 * copies)
    call(
        "norm_backward",
        checked(dy, *stream.shape),
        checked(dstream, *stream.shape),
        stream,
        checked(statistics, tokens, STATISTICS),
        checked(gain, 6 * copies),
        checked(branch, *stream.shape),
        checked(bias, copies),
        checked(scale, 6 * copies),
        checked(sample_scale, tokens // tokens_per_sample),
        dx,
        dbranch,
        sums,
        float(pair_weight),
        tokens,
        tokens_per_sample,
        copies,
    )
    # An operator's results share no memory.
    sums = sums.sum(0).split([6 * copies, copies, 6 * copies, copies])
    dgain, dshift, dscale, dbias = (part.clone() for part in sums)
    # Of the types that compiled models were promised, those of what they are gradients of.
    return (
        dx,
        None if branch is None or dbranch is None else dbranch.to(branch.dtype),
        dgain.to(gain.dtype),
        dshift.to(gain.dtype),
        None if scale is None else dscale.to(scale.dtype),
        None if bias is None else dbias.to(bias.dtype),
    )
