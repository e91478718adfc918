"""Tokens as rows of a matrix, and some of them: taken out of it, and put back between zeros.

The one is the gradient of the other, and both only look up where a row comes from: no two ever write to one place,
and nothing has to be filled with zeros first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


def flat(x: Tensor) -> Tensor:
    """The tokens of x [..., C] as rows, [T, C]."""
    return x.reshape(-1, x.shape[-1])


def lines(*vectors: Tensor | None) -> list[Tensor | None]:
    """Vectors whose entries lie side by side, as kernels read them."""
    return [None if vector is None else vector.contiguous() for vector in vectors]


def require_length(length: int, **vectors: Tensor | None) -> None:
    """Refuse vectors of another length, past whose ends kernels would read."""
    for name, vector in vectors.items():
        if vector is not None and vector.shape != (length,):
            raise ValueError(f"expected {name} of {length} entries, got shape {tuple(vector.shape)}")


class Rows(NamedTuple):
    """n different rows of T. chosen [n]: which; place [T], int32: where each of the T is among the n, or −1."""

    chosen: Tensor
    place: Tensor

    def of(self, x: Tensor) -> Tensor:
        """The rows of x [T, C], [n, C]."""
        taken: Tensor = _Take.apply(x, *self)
        return taken

    def spread(self, x: Tensor) -> Tensor:
        """The rows x [n, C] at their places among zeros, [T, C]."""
        spread: Tensor = _Spread.apply(x, *self)
        return spread


class _Lookup(torch.autograd.Function):
    """What both have in common: they remember the rows."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[1:])


class _Take(_Lookup):
    @staticmethod
    def forward(x: Tensor, chosen: Tensor, place: Tensor) -> Tensor:
        return x.index_select(0, chosen)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Spread.apply(grad, *ctx.saved_tensors), None, None


class _Spread(_Lookup):
    @staticmethod
    def forward(x: Tensor, chosen: Tensor, place: Tensor) -> Tensor:
        there = place >= 0
        return torch.where(there.unsqueeze(1), x.index_select(0, place.clamp(min=0)), 0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _Take.apply(grad, *ctx.saved_tensors), None, None
