"""Masks of blocks of patches, for iBOT."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from random import Random

import numpy as np
import torch
from torch import Tensor

from quickvit.data.seeds import derived_seed

# BEiT's and DINOv2's: patches in the smallest block, its narrowest form, and how often a place for it is tried.
SMALLEST_BLOCK = 4
LOWEST_ASPECT = 0.3
TRIES = 10


@dataclass(frozen=True)
class BlockMasking:
    """Which patches of the global views are hidden from the student, as DINOv2 decides it for the images of a GPU.

    Of the views of `group` consecutive images a share of `probability` is masked, exactly. The masked ones hide
    shares of their patches that are spread evenly over `ratio`, one in each of as many intervals, and which view
    gets which is random. So the number of hidden patches of a group hardly varies, and never exceeds `most`.

    grid: rows and columns of patches. views: global views of an image.
    """

    grid: tuple[int, int]
    probability: float = 0.5
    ratio: tuple[float, float] = (0.1, 0.5)
    group: int = 64
    views: int = 2

    def __post_init__(self) -> None:
        low, high = self.ratio
        if not 0 <= low <= high <= 1:
            raise ValueError(f"ratio must be two rising numbers from 0 to 1, got {self.ratio}")
        if not 0 <= self.probability <= 1:
            raise ValueError(f"probability must be from 0 to 1, got {self.probability}")
        if min(*self.grid, self.group, self.views) < 1:
            raise ValueError(
                f"grid, group and views must be at least 1, got {self.grid}, {self.group} and {self.views}"
            )

    @property
    def patches(self) -> int:
        """Patches of a view."""
        return self.grid[0] * self.grid[1]

    @cached_property
    def intervals(self) -> list[tuple[float, float]]:
        """The intervals of the shares of hidden patches, one for each masked view of a group."""
        number = int(self.group * self.views * self.probability)
        low, high = self.ratio
        bounds = [low + (high - low) * i / max(number, 1) for i in range(number + 1)]
        return list(pairwise(bounds))

    @cached_property
    def most(self) -> int:
        """The most patches that can be hidden in a group."""
        return sum(int(self.patches * high) for _, high in self.intervals)

    def __call__(self, seed: int, first: int, count: int) -> Tensor:
        """The masks [count, views, patches] of consecutive images of a batch: functions of seed and place."""
        masks = np.zeros((count, self.views, *self.grid), dtype=bool)
        groups = range(first // self.group, (first + count - 1) // self.group + 1)
        shares = {group: self._shares(derived_seed(seed, group)) for group in groups}
        for place in range(first, first + count):
            group, inside = divmod(place, self.group)
            for view in range(self.views):
                interval = shares[group][inside * self.views + view]
                if interval is not None:
                    random = Random(derived_seed(seed, place, view))
                    self.hide(
                        masks[place - first, view], int(self.patches * random.uniform(*interval)), random
                    )
        return torch.from_numpy(masks).flatten(2)

    def hide(self, mask: np.ndarray, number: int, random: Random) -> None:
        """Hide blocks in a mask until `number` patches are hidden, or no more block finds a place."""
        left = number
        while left > 0:
            hidden = self._hide_block(mask, min(left, self.patches // 2), random)
            if not hidden:
                return
            left -= hidden

    def _hide_block(self, mask: np.ndarray, most: int, random: Random) -> int:
        """Hide one more block; how many patches it adds, at most `most`."""
        rows, columns = self.grid
        log_aspect = math.log(LOWEST_ASPECT)
        for _ in range(TRIES):
            area = random.uniform(SMALLEST_BLOCK, most)
            aspect = math.exp(random.uniform(log_aspect, -log_aspect))
            height, width = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
            if height >= rows or width >= columns:
                continue
            top, left = random.randint(0, rows - height), random.randint(0, columns - width)
            block = mask[top : top + height, left : left + width]
            added = int(block.size - block.sum())
            if 0 < added <= most:
                block[:] = True
                return added
        return 0

    def _shares(self, seed: int) -> list[tuple[float, float] | None]:
        """The interval of each view of a group, None where nothing is hidden."""
        views: list[tuple[float, float] | None] = [*self.intervals]
        views += [None] * (self.group * self.views - len(views))
        Random(seed).shuffle(views)
        return views
