"""Placeholder for quickvit.train.distributed until that is merged."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """This process's place among those of the run; without others, every agreement is its own word."""

    rank: int = 0
    size: int = 1
    device: torch.device = torch.device("cpu")

    @property
    def main(self) -> bool:
        """Whether this is the process that writes for all."""
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """A small object of every rank, on every rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def barrier(self) -> None:
        """Wait for all."""
        self.gather(None)
