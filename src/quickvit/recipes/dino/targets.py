"""From a teacher's logits to the targets of a student, by softmax with a centre or by Sinkhorn–Knopp, and its losses.

Either way the target of a token is softmax(logits / τ + shift), with one shift [K] for all tokens: that of the
centre, or Sinkhorn–Knopp's scales of the prototypes. So the targets themselves, of tens of thousands of prototypes,
need not be stored.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from quickvit.recipes.dino.losses import dino_loss, ibot_loss, wide
from quickvit.recipes.dino.watch import agreement, target_entropy
from quickvit.train import World

Centering = Literal["softmax", "sinkhorn", "none"]
Kind = Literal["class", "patch"]

# DINO's memory of the centre, and SwAV's and DINOv2's iterations.
MOMENTUM = 0.9
ITERATIONS = 3
# Updates for which a prototype that was chosen counts as used.
RECENT = 100


def assign(logits: Tensor, shift: Tensor, temperature: float | Tensor) -> Tensor:
    """The targets softmax(logits / temperature + shift), [..., K]."""
    return (wide(logits) / temperature + shift).softmax(-1)


@torch.no_grad()
def sinkhorn(
    logits: Tensor,
    temperature: float | Tensor,
    world: World | None = None,
    counted: Tensor | None = None,
    iterations: int = ITERATIONS,
) -> Tensor:
    """The shift [K] with which, nearly, all prototypes are used equally.

    The columns and rows of exp(logits / temperature) [n, K] are scaled in turns, over the rows of all ranks together,
    however many each has; the shift is the logarithm of the columns' scales. Logits are cosines. counted [n]: rows
    that take part.
    """
    world = world or World()
    scores = wide(logits) / temperature
    if counted is not None:
        scores = scores.masked_fill(~counted[:, None], -torch.inf)
    lowest = torch.finfo(scores.dtype).min
    highest = scores.amax().clamp(min=lowest) if len(scores) else scores.new_full((), lowest)
    tiny = torch.finfo(scores.dtype).tiny
    assigned = (scores - world.max(highest)).exp_()
    rows, columns = scores.new_ones(len(scores)), scores.new_ones(scores.shape[1])
    # Autocast would take these products for those of a layer.
    with torch.autocast(logits.device.type, enabled=False):
        for _ in range(iterations):
            columns = world.sum(rows @ assigned).clamp_(min=tiny).reciprocal_()
            rows = (assigned @ columns).clamp_(min=tiny).reciprocal_()
    return columns.log()


class Logits(NamedTuple):
    """Of class tokens of V views of B images, of hidden patches, and of class tokens of local views: rows [n, K].

    shape: B and V. hidden: how many patches. They stay in one piece until they are compared, since so does their
    gradient, which is hundreds of megabytes.
    """

    rows: Tensor
    shape: tuple[int, int]
    hidden: int

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Of classes [B, V, K], of patches [hidden, K] and of local views [B, L, K]."""
        images, views = self.shape
        local = len(self.rows) - images * views - self.hidden
        classes, patches, rest = self.rows.split([images * views, self.hidden, local])
        return classes.unflatten(0, self.shape), patches, rest.unflatten(0, (images, local // images))


class Comparison(NamedTuple):
    """Losses, signs of collapse, and sums for the centres and for the use of the prototypes."""

    dino: Tensor
    ibot: Tensor
    target_entropy: Tensor
    agreement: Tensor
    seen: Tensor


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
    def shift(
        self,
        logits: Tensor,
        kind: Kind,
        temperature: float | Tensor,
        world: World,
        counted: Tensor | None = None,
    ) -> Tensor:
        """The shift [K] of the targets of logits [n, K]; counted [n]: rows that are meant."""
        if self.centering == "sinkhorn":
            return sinkhorn(logits, temperature, world, counted)
        if self.centering == "none":
            return torch.zeros_like(self.class_center)
        return (self.class_center if kind == "class" else self.patch_center) / -temperature

    def forward(
        self,
        student: Logits,
        teacher: Logits,
        shifts: tuple[Tensor, Tensor],
        temperature: float | Tensor,
        weights: Tensor,
        counted: Tensor,
    ) -> Comparison:
        """How far a student is from the targets, whose shifts are those of class tokens and of patches.

        weights, counted [n]: of hidden patches, see `HiddenPatches`. All that is as large as logits is here, in one
        piece, since compiled it need not be written to memory.
        """
        with torch.no_grad():
            taught, hidden, _ = teacher.parts()
            classes = assign(taught, shifts[0], temperature)
            patches = assign(hidden, shifts[1], temperature)
            seen = sums(taught.flatten(0, 1), classes.flatten(0, 1), hidden, counted)
        found, guessed, local = student.parts()
        return Comparison(
            dino_loss(found, local, classes),
            ibot_loss(guessed, patches, weights, taught.shape[:2].numel()),
            target_entropy(classes),
            agreement(found, classes),
            seen.to(self.usage.dtype),
        )

    def observe(self, seen: Tensor) -> None:
        """Note the sums of a batch, see `sums`; they are copied, since a CUDA graph would write over them."""
        self._sums = seen.clone() if self._sums is None else self._sums + seen

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


def sums(classes: Tensor, targets: Tensor, patches: Tensor, counted: Tensor) -> Tensor:
    """What an update takes in of logits and targets of class tokens, [n, K], and logits of patches, [m, K].

    Over class tokens and over patches that are counted [m]: the sums of their logits, that of the targets, for each
    prototype whether it is a first choice; and the numbers of both. [4 K + 2]
    """
    chosen = torch.zeros_like(targets[0]).scatter(0, targets.argmax(-1), 1.0)
    hidden = torch.where(counted[:, None], wide(patches), 0)
    counts = targets.new_full((1,), len(classes)), counted.sum(0, keepdim=True).to(targets.dtype)
    return torch.cat([wide(classes).sum(0), hidden.sum(0), targets.sum(0), chosen, *counts])


def _approach(mean: Tensor, total: Tensor, count: Tensor) -> None:
    """mean ← 0.9 · mean + 0.1 · total / count; nothing where nothing was counted."""
    mean.lerp_(total / count.clamp(min=1), (count > 0).to(mean.dtype) * (1 - MOMENTUM))
