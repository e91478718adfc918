"""Sequences of several lengths in one tensor: batches [Bᵢ, Nᵢ, C] one after the other, [Σ Bᵢ Nᵢ, C].

What acts on single tokens takes them all at once. Attention alone must know where sequences end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn import functional

# The number of sequences in each batch, and their length.
Shapes = tuple[tuple[int, int], ...]


def pack(batches: Sequence[Tensor]) -> tuple[Tensor, Shapes]:
    """The batches in one tensor, and their shapes."""
    shapes = tuple((x.shape[0], x.shape[1]) for x in batches)
    flat = [x.flatten(0, 1) for x in batches]
    return (torch.cat(flat) if len(flat) > 1 else flat[0]), shapes


def unpack(x: Tensor, shapes: Shapes) -> list[Tensor]:
    """The batches as views of the packed tensor."""
    # The gradient of a split is a copy, even of one part.
    parts = x.split([number * length for number, length in shapes]) if len(shapes) > 1 else (x,)
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def places(shapes: Shapes) -> Iterator[tuple[int, int, int]]:
    """The first token of each batch that has any, the number of its sequences and their length."""
    first = 0
    for number, length in shapes:
        if number * length:
            yield first, number, length
        first += number * length


def as_shapes(numbers: list[int], lengths: list[int]) -> Shapes:
    """Shapes from two lists, as operators are told them."""
    return tuple(zip(numbers, lengths, strict=True))


def batches(numbers: list[int], lengths: list[int]) -> Iterator[tuple[int, tuple[int, int]]]:
    """The first token and the shape of each batch."""
    origin = 0
    for number, length in as_shapes(numbers, lengths):
        yield origin, (number, length)
        origin += number * length


def pairs(numbers: list[int], lengths: list[int]) -> int:
    """Pairs of a query and a key."""
    return sum(number * length**2 for number, length in as_shapes(numbers, lengths))


def attend(q: Tensor, k: Tensor, v: Tensor, *, dropout: float = 0.0) -> Tensor:
    """softmax(q kᵀ / √D) v of heads [B, N, H, D], in PyTorch's operator."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(1, 2)
