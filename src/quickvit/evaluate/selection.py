"""Choosing hyper-parameters on a part of the training data that is held out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quickvit.data import derived_seed

# As in DINOv2 and CAPI.
FRACTION = 0.1


@dataclass(frozen=True)
class Trial:
    """Hyper-parameters by name, and their score on what was held out."""

    choice: dict[str, Any]
    score: float


def best(trials: Sequence[Trial]) -> dict[str, Any]:
    """The choice with the highest score, the first of several."""
    if not trials:
        raise ValueError("there is nothing to choose from; give at least one value to try")
    return max(trials, key=lambda trial: trial.score).choice


def hold_out(targets: Tensor, fraction: float = FRACTION, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices of the samples to train on and of those to choose on, both ascending.

    Every class gives the same fraction, but at least one sample and never all of them: a class with one sample
    stays in training.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"the fraction to hold out must lie between 0 and 1, got {fraction}")
    generator = torch.Generator().manual_seed(derived_seed(seed, "hold out"))
    order = torch.randperm(len(targets), generator=generator)
    order = order[targets[order].argsort(stable=True)]
    counts = targets.unique(return_counts=True)[1]
    place = torch.arange(len(targets)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
    quota = (counts * fraction).round().long().clamp(min=1).minimum(counts - 1)
    held = place < quota.repeat_interleave(counts)
    if not held.any():
        raise ValueError("nothing can be held out for choosing: every class has a single sample")
    return order[~held].sort().values, order[held].sort().values
