"""From a teacher's logits to the targets of a student: softmax with a centre, or Sinkhorn–Knopp."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from quickvit.recipes.dino.losses import wide
from quickvit.train import World

Centering = Literal["softmax", "sinkhorn", "none"]
Kind = Literal["class", "patch"]

# DINO's memory of the centre, and SwAV's and DINOv2's iterations.
MOMENTUM = 0.9
ITERATIONS = 3
# Updates for which a prototype that was chosen counts as used.
RECENT = 100


@torch.no_grad()
def sinkhorn(
    logits: Tensor,
    temperature: float,
    world: World | None = None,
    counted: Tensor | None = None,
    iterations: int = ITERATIONS,
) -> Tensor:
    """Assignments [n, K] in which every row sums to 1 and, nearly, all prototypes are used equally.

    exp(logits / temperature) with columns and rows scaled in turns, over the rows of all ranks together, however
    many each has. Logits are cosines. counted [n]: rows that take part; the others become 0.
    """
    world = world or World()
    scores = wide(logits) / temperature
    if counted is None:
        counted = torch.ones(len(scores), dtype=torch.bool, device=scores.device)
    scores = scores.masked_fill(~counted[:, None], -torch.inf)
    lowest = torch.finfo(scores.dtype).min
    highest = scores.amax().clamp(min=lowest) if len(scores) else scores.new_full((), lowest)
    tiny = torch.finfo(scores.dtype).tiny
    assigned = (scores - world.max(highest)).exp_()
    for _ in range(iterations):
        assigned /= world.sum(assigned.sum(0)).clamp_(min=tiny)
        assigned /= assigned.sum(1, keepdim=True).clamp_(min=tiny)
    return assigned


class Targets(nn.Module):
    """The teacher's targets, and what has to be remembered for them: centres, and the use of the prototypes.

    The centre of class tokens and that of patches are means of their logits over the batches of the past, so those
    of a step do not depend on its own batch. Batches add up in `observe` until `update` takes them in: one pass or
    several, on one rank or on many, are the same.

    class_center, patch_center [K]. usage [K]: mean target of class tokens. last_chosen [K]: the last update in
    which a prototype was the first choice for a class token. updates: how many were taken in.
    """

    updates: Tensor
    class_center: Tensor
    patch_center: Tensor
    usage: Tensor
    last_chosen: Tensor

    def __init__(self, prototypes: int, centering: Centering, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.centering = centering
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("class_center", torch.zeros(prototypes, dtype=dtype))
        self.register_buffer("patch_center", torch.zeros(prototypes, dtype=dtype))
        self.register_buffer("usage", torch.full((prototypes,), 1 / prototypes, dtype=dtype))
        self.register_buffer("last_chosen", torch.full((prototypes,), -RECENT, dtype=torch.int64))
        self._sums: Tensor | None = None

    def begin(self) -> None:
        """Forget what was observed and not taken in."""
        self._sums = None

    @torch.no_grad()
    def forward(
        self, logits: Tensor, kind: Kind, temperature: float, world: World, counted: Tensor | None = None
    ) -> Tensor:
        """Targets [n, K] for logits [n, K]; counted [n] are the rows that are meant, the others get 0."""
        if self.centering == "sinkhorn":
            return sinkhorn(logits, temperature, world, counted)
        scores = wide(logits)
        if self.centering == "softmax":
            scores = scores - (self.class_center if kind == "class" else self.patch_center)
        targets = (scores / temperature).softmax(-1)
        return targets if counted is None else targets * counted[:, None]

    @torch.no_grad()
    def observe(self, classes: Tensor, targets: Tensor, patches: Tensor, counted: Tensor) -> None:
        """Note logits and targets of class tokens, [n, K], and logits of patches, [m, K], of which some count."""
        dtype = self.usage.dtype
        chosen = torch.zeros_like(self.usage).scatter_(0, targets.argmax(-1), 1.0)
        hidden = (patches * counted[:, None]).sum(0, dtype=dtype)
        counts = [self.usage.new_full((1,), len(classes)), counted.sum(0, keepdim=True).to(dtype)]
        seen = torch.cat([classes.sum(0, dtype=dtype), hidden, targets.sum(0, dtype=dtype), chosen, *counts])
        self._sums = seen if self._sums is None else self._sums + seen

    @torch.no_grad()
    def update(self, step: int, world: World) -> None:
        """Take in what all ranks have observed in update number `step`."""
        if self._sums is None:
            return
        *sums, rest = world.sum(self._sums).split(len(self.usage))
        self._sums = None
        classes, patches, usage, chosen = sums
        _approach(self.class_center, classes, rest[0])
        _approach(self.patch_center, patches, rest[1])
        _approach(self.usage, usage, rest[0])
        self.last_chosen.masked_fill_(chosen > 0, step)
        self.updates.fill_(step + 1)

    def numbers(self, step: int) -> dict[str, Tensor]:
        """The entropy of the use of the prototypes, relative to equal use, and how many were used lately."""
        entropy = torch.special.entr(self.usage).sum() / math.log(len(self.usage))
        used = (self.last_chosen > step - RECENT).sum()
        return {"prototype_entropy": entropy, "prototypes_used": used.to(self.usage.dtype)}


def _approach(mean: Tensor, total: Tensor, count: Tensor) -> None:
    """mean ← 0.9 · mean + 0.1 · total / count; nothing where nothing was counted."""
    mean.lerp_(total / count.clamp(min=1), (count > 0).to(mean.dtype) * (1 - MOMENTUM))
