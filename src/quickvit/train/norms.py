"""Norms of many tensors in a few launches, whole or sharded over the ranks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor; shares its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_index(tensor: Tensor) -> tuple[int, ...]:
    """Where this rank's part of a tensor begins in the whole."""
    first = [0] * tensor.ndim
    if isinstance(tensor, DTensor):
        (placement,) = tensor.placements
        if isinstance(placement, Shard):
            chunk = -(-tensor.shape[placement.dim] // tensor.device_mesh.size())
            start = tensor.device_mesh.get_local_rank() * chunk
            first[placement.dim] = min(start, tensor.shape[placement.dim])
    return tuple(first)


class Parts:
    """Tensors, or with `stacked` the slices of each along its first axis, that have a norm of their own."""

    def __init__(self, tensors: Sequence[Tensor], *, stacked: bool = False) -> None:
        self.like = local(tensors[0])
        self.views: list[Tensor] = []
        self.places: list[int] = []
        self.number = 0
        self.group: dist.ProcessGroup | None = None
        for tensor in tensors:
            views = local(tensor).unbind(0) if stacked else (local(tensor),)
            first = self.number + (first_index(tensor)[0] if stacked else 0)
            self.views += views
            self.places += range(first, first + len(views))
            self.number += tensor.shape[0] if stacked else 1
            if isinstance(tensor, DTensor):
                self.group = tensor.device_mesh.get_group()

    def norms(self) -> Tensor:
        """The Euclidean norm of each of the tensors or slices, the same on every rank."""
        if self.group is None:
            return torch.stack(torch._foreach_norm(self.views))
        squares = self.like.new_zeros(self.number)
        if self.views:
            places = torch.tensor(self.places, device=squares.device)
            squares[places] = torch.stack(torch._foreach_norm(self.views)).square()
        dist.all_reduce(squares, group=self.group)
        return squares.sqrt()


def clip_(gradients: Sequence[Tensor], largest: float | None) -> Tensor:
    """Scale gradients in place so that their common norm is at most `largest`; returns the norm before."""
    norm = torch.linalg.vector_norm(Parts(gradients).norms())
    if largest is not None:
        torch._foreach_div_([local(gradient) for gradient in gradients], (norm / largest).clamp_(min=1.0))
    return norm
