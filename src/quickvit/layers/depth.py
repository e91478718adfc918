"""Stochastic depth: residual branches that random samples skip in training.

Either a branch is computed for all samples and multiplied by 0 for those that skip it (`sample_scale`), or it is
computed for the others alone (`draw_subset`), as DINOv2 does: always for the same number of samples, so that shapes
stay, and so that what is skipped costs nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quickvit.ops.packing import Shapes
from quickvit.ops.rows import Rows


def sample_scale(x: Tensor, drop_path: float, training: bool, shapes: Shapes | None = None) -> Tensor | None:
    """One factor per sample of x [B, ...], 0 or 1/(1 − p); None where nothing is dropped.

    For packed sequences (see `packing`) it is one factor per token, the same for all tokens of a sequence.
    """
    if not training or not drop_path:
        return None
    keep = 1 - drop_path
    samples = x.shape[0] if shapes is None else sum(number for number, _ in shapes)
    scale = torch.empty(samples, device=x.device, dtype=torch.float32).bernoulli_(keep) / (keep or 1)
    if shapes is None:
        return scale
    parts = zip(scale.split([number for number, _ in shapes]), shapes, strict=True)
    return torch.cat([part.unsqueeze(1).expand(shape).flatten() for part, shape in parts])


class Kept(NamedTuple):
    """Samples that go through a branch: their tokens, by what the branch is multiplied there, and their shapes.

    rows: None for all. scale: one factor per sample, or per token where they are packed; None for 1. Tokens that were
    chosen are packed, whether all tokens were or not.
    """

    rows: Rows | None
    scale: Tensor | None
    shapes: Shapes | None

    def of(self, x: Tensor) -> Tensor:
        """Their tokens of x [B, N, C] or [T, C]."""
        return x if self.rows is None else self.rows.of(x.flatten(0, -2))

    def add(self, x: Tensor, branch: Tensor) -> Tensor:
        """x plus the branch, so that its mean over all draws is that of a branch of all samples."""
        if self.scale is not None:
            branch = branch * self.scale.to(branch.dtype).view(-1, *[1] * (branch.ndim - 1))
        total: Tensor = x + (branch if self.rows is None else self.rows.spread(branch).view(x.shape))
        return total.to(x.dtype)


def keep(
    x: Tensor, drop_path: float, *, training: bool, subset: bool = False, shapes: Shapes | None = None
) -> Kept:
    """Draw the samples of x [B, N, C], or of packed sequences [T, C], that go through a branch."""
    if training and drop_path and subset:
        return draw_subset(x, drop_path, shapes)
    return Kept(None, sample_scale(x, drop_path, training, shapes), shapes)


def draw_subset(x: Tensor, drop_path: float, shapes: Shapes | None = None) -> Kept:
    """All samples of x [B, N, C] but a share of `drop_path`, rounded down; of packed sequences, of each batch."""
    batches = shapes or ((x.shape[0], x.shape[1]),)
    numbers = [number for number, _ in batches]
    ranks, orders = (some.split(numbers) for some in _random_order(numbers, x.device))
    chosen, places, scales, kept = [], [], [], []
    sample = token = row = 0
    for rank, order, (number, length) in zip(ranks, orders, batches, strict=True):
        count = min(number, max(1, number - int(number * drop_path)))
        step = torch.arange(length, device=x.device)
        first, rank = order[:count].unsqueeze(1) - sample, rank.unsqueeze(1) - sample
        chosen.append((token + length * first + step).flatten())
        places.append(torch.where(rank < count, row + length * rank + step, -1).flatten())
        scales.append(
            torch.full((count * length,), number / max(1, count), device=x.device, dtype=torch.float32)
        )
        kept.append((count, length))
        sample, token, row = sample + number, token + number * length, row + count * length
    rows = Rows(torch.cat(chosen), torch.cat(places).to(torch.int32))
    return Kept(rows, torch.cat(scales), tuple(kept))


def _random_order(numbers: list[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """The place of each sample in a random order that keeps batches apart, and the sample at each place.

    By comparing all pairs: that is fewer launches than a sort, and where only the places are used a single one.
    """
    keys = torch.rand(sum(numbers), device=device).split(numbers)
    key = torch.cat([part + i for i, part in enumerate(keys)])
    sample = torch.arange(len(key), device=device)
    earlier = sample.unsqueeze(0) < sample.unsqueeze(1)
    before = torch.where(earlier, key.unsqueeze(0) <= key.unsqueeze(1), key.unsqueeze(0) < key.unsqueeze(1))
    rank = before.sum(1)
    return rank, torch.empty_like(rank).scatter(0, rank, sample)
