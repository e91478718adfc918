"""What a recipe tells the engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from quickvit.data import Batch
from quickvit.train.distributed import World

Precision = Literal["bf16", "float32", "float64"]
"""Of the forward and backward pass; bf16 is autocast."""


class Recipe(ABC):
    """Modules, batches and a loss; the engine does the rest.

    modules: everything whose weights are the state of the run, trained or not, by name. The engine moves them to
        the device and may wrap them (DDP), so they are to be called through this dictionary. Those with trained
        parameters are clipped one by one.
    total_steps, steps_per_epoch: updates of the whole run and of an epoch.
    batch_size: samples per update, of all ranks together.
    clip: largest norm of a module's gradient.
    precision: of the forward and backward pass; bf16 is PyTorch's autocast with float32 weights.
    batch_type: the named tuple of tensors that a batch is.
    evaluates_first: whether there is something to evaluate before the first update.
    later_settings: settings that checkpoints of earlier releases do not have, and are resumed without.
    world: the ranks that train together, from the engine.
    """

    name: ClassVar[str]
    batch_type: ClassVar[Any] = Batch
    evaluates_first: ClassVar[bool] = False
    later_settings: ClassVar[tuple[str, ...]] = ()

    modules: dict[str, nn.Module]
    total_steps: int
    steps_per_epoch: int
    batch_size: int
    seed: int = 0
    clip: float | None = None
    precision: Precision = "float32"
    world: World = World()

    def settings(self) -> Mapping[str, Any]:
        """What decides the result, as JSON; a run is resumed with the same settings only."""
        return {}

    @abstractmethod
    def optimizer(self) -> Optimizer:
        """An optimiser over the modules as they are now; `set_schedules` is called on it before each step."""

    @abstractmethod
    def batches(self, start: int, world: World) -> Iterator[Any]:
        """This rank's part of the batches of steps `start` … `total_steps` − 1, on its device."""

    @abstractmethod
    def loss(self, batch: Any, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The mean loss over a batch, and further numbers to log."""

    def split(self, batch: Any, parts: int) -> list[Any]:
        """A batch as micro-batches of equal size."""
        pieces = zip(*(tensor.tensor_split(parts) for tensor in batch), strict=True)
        return [self.batch_type(*tensors) for tensors in pieces]

    def after_step(self, step: int) -> None:  # noqa: B027
        """Called after update number `step`: the place for averages and teachers."""

    def evaluate(self, world: World) -> dict[str, float]:  # noqa: ARG002
        """Numbers on held-out data; called on all ranks, without gradients, in evaluation mode."""
        return {}

    def export(self, folder: Path, world: World) -> None:  # noqa: B027
        """Write the result of the run; called on all ranks."""

    def autocast(self, device: torch.device) -> torch.autocast:
        """The precision, as a context."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")
