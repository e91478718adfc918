"""A captured update computed again, to see where it stops being finite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quickvit.data import derived_seed
from quickvit.train.checkpoint import MANIFEST, Store
from quickvit.train.distributed import CPU, World
from quickvit.train.recipe import Recipe
from quickvit.train.trainer import RunConfig, Trainer


@dataclass(frozen=True)
class Replay:
    """What a captured update gave.

    metrics: the loss and its companions. output: the first module whose output was not finite. gradients: the
    parameters whose gradients were not.
    """

    step: int
    rank: int
    metrics: dict[str, float]
    output: str | None
    gradients: list[str]

    @property
    def finite(self) -> bool:
        """Whether the trouble did not show again."""
        values = torch.tensor(list(self.metrics.values()))
        return bool(values.isfinite().all()) and self.output is None and not self.gradients


def read_capture(folder: Path) -> dict[str, Any]:
    """What a captured update says of its run: the name of the recipe and its settings."""
    if not (folder / MANIFEST).is_file():
        raise FileNotFoundError(f"{folder} is no captured update; those of a run are in RUN/captured/step-…")
    return Store(folder.parent, World()).check(folder).about


def replay(recipe: Recipe, folder: Path, rank: int = 0, device: torch.device = CPU) -> Replay:
    """Compute a captured update of one rank again, with its weights, its batch and its randomness."""
    world = World(device=device)
    store = Store(folder.parent, world)
    manifest = store.check(folder)
    trainer = Trainer(recipe, RunConfig(accumulate=manifest.about["accumulate"]), world=world)
    store.check(folder, trainer.state())
    store.load(folder, trainer.state())
    tensors = {name: tensor.to(world.device) for name, tensor in store.load_own(folder, rank).items()}
    batch = recipe.batch_type(**tensors)
    first: list[str] = []
    handles = [
        module.register_forward_hook(_watch(f"{name}.{inner}".rstrip("."), first))
        for name, whole in recipe.modules.items()
        for inner, module in whole.named_modules()
    ]
    with torch.random.fork_rng():
        torch.manual_seed(derived_seed(recipe.seed, "model", manifest.step, rank))
        trainer.train_mode(True)
        metrics = trainer.gradients(manifest.step, batch)
    for handle in handles:
        handle.remove()
    gradients = [
        f"{name}.{key}"
        for name, module in recipe.modules.items()
        for key, p in module.named_parameters()
        if p.grad is not None and not p.grad.isfinite().all()
    ]
    numbers = {name: value.item() for name, value in metrics.items()}
    return Replay(manifest.step, rank, numbers, first[0] if first else None, gradients)


def _watch(name: str, found: list[str]) -> Callable[[nn.Module, Any, Any], None]:
    def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
        tensors = output if isinstance(output, tuple) else (output,)
        if not all(t.isfinite().all() for t in tensors if isinstance(t, Tensor)):
            found.append(name)

    return hook
