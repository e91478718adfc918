"""GELU through the regular domain, see gelu.c."""

from __future__ import annotations

import torch
from torch import Tensor

from quickvit.ops.cpu.library import call, checked


def gelu_forward(
    x: Tensor, bias: Tensor | None, out: Tensor | None = None, row_scale: Tensor | None = None
) -> Tensor:
    """Qᵀ GELU(Q (s x + b e_A1)) of x[T, C], written to out, which may be x; s is the row_scale[T] or 1."""
    tokens, copies = x.shape[0], x.shape[1] // 8
    y = torch.empty_like(x) if out is None else out
    if y.shape != x.shape:
        raise ValueError(f"expected an output of shape {tuple(x.shape)}, got {tuple(y.shape)}")
    if row_scale is not None:
        x = torch.mul(x, row_scale[:, None], out=y)
    call("gelu_forward", x, checked(bias, copies), y, tokens, copies)
    return y


def gelu_backward(grad: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """Gradient dx = Qᵀ (GELU'(Q (x + b e_A1)) · Q grad). The bias's is the sum of A1's."""
    tokens, copies = x.shape[0], x.shape[1] // 8
    dx = torch.empty_like(x)
    call("gelu_backward", checked(grad, *x.shape), x, checked(bias, copies), dx, tokens, copies)
    return dx
