"""Sequences of several lengths in one tensor: batches [Bᵢ, Nᵢ, C] one after the other, [Σ Bᵢ Nᵢ, C].

What acts on single tokens takes them all at once. Attention alone must know where sequences end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The number of sequences in each batch, and their length.
Shapes = tuple[tuple[int, int], ...]


def pack(batches: Sequence[Tensor]) -> tuple[Tensor, Shapes]:
    """The batches in one tensor, and their shapes."""
    shapes = tuple((x.shape[0], x.shape[1]) for x in batches)
    flat = [x.flatten(0, 1) for x in batches]
    return (torch.cat(flat) if len(flat) > 1 else flat[0]), shapes


def unpack(x: Tensor, shapes: Shapes) -> list[Tensor]:
    """The batches as views of the packed tensor."""
    parts = x.split([number * length for number, length in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def each(function: Callable[[Tensor], Tensor], x: Tensor, shapes: Shapes | None) -> Tensor:
    """The function of each batch, packed again; of x itself if it is not packed."""
    return function(x) if shapes is None else pack([function(batch) for batch in unpack(x, shapes)])[0]
