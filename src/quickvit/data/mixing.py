"""Mixup and CutMix: every image of a batch mixed with another, its target too."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor
from torch.nn import functional

from quickvit.data.seeds import derived_seed


class Mix(NamedTuple):
    """The share that an image keeps, and for CutMix the box (top, bottom, left, right) that the other fills."""

    share: float
    box: tuple[int, int, int, int] | None


@dataclass(frozen=True)
class Mixing:
    """Mixup or CutMix of neighbours: image 2i with image 2i + 1.

    Neighbours, since ranks and micro-batches hold slices of the global batch, and any even slice then mixes the
    same pairs.

    classes: number of classes. mixup, cutmix: α of the Beta distribution of the share, 0 for never.
    switch: odds of CutMix where both are on. probability: odds of any mixing. smoothing: of the labels.
    group: so many consecutive images share one draw. DeiT III draws once on each GPU, for 128 images of a ViT-L.
    """

    classes: int
    mixup: float = 0.8
    cutmix: float = 1.0
    switch: float = 0.5
    probability: float = 1.0
    smoothing: float = 0.0
    group: int = 128

    def __post_init__(self) -> None:
        if self.classes < 2:
            raise ValueError(f"mixing needs at least 2 classes, got {self.classes}")
        for name in ("mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("switch", "probability", "smoothing"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.group < 2 or self.group % 2:
            raise ValueError(f"group must be even and at least 2, got {self.group}")

    def __call__(self, images: Tensor, targets: Tensor, seed: int, first: int = 0) -> tuple[Tensor, Tensor]:
        """Mix images [B, C, H, W] in place, and turn targets [B] into [B, classes].

        seed: decides the draws of the global batch; first: the place of the first image in it.
        """
        hot = functional.one_hot(targets, self.classes).to(images.dtype)
        hot = hot * (1 - self.smoothing) + self.smoothing / self.classes
        if not (self.mixup or self.cutmix):
            return images, hot
        if len(images) % 2 or first % 2:
            raise ValueError(
                f"mixing needs an even number of images, got {len(images)} from number {first} on"
            )
        last = first + len(images)
        for start in range(first - first % self.group, last, self.group):
            part = slice(max(start, first) - first, min(start + self.group, last) - first)
            mix = self.draw(derived_seed(seed, start // self.group), images.shape[-2], images.shape[-1])
            hot[part] = _blend(hot[part], mix.share)
            if mix.box is None:
                images[part] = _blend(images[part], mix.share)
            else:
                top, bottom, left, right = mix.box
                inside = images[part, :, top:bottom, left:right]
                inside.copy_(_neighbours(inside))
        return images, hot

    def draw(self, seed: int, height: int, width: int) -> Mix:
        """The share and box of a group; drawn in timm's order from a stream that NumPy keeps for ever."""
        random = np.random.RandomState(seed % 2**32)
        if not (self.mixup or self.cutmix) or random.rand() >= self.probability:
            return Mix(1.0, None)
        use_cutmix = bool(self.cutmix) and (not self.mixup or random.rand() < self.switch)
        alpha = self.cutmix if use_cutmix else self.mixup
        share = float(random.beta(alpha, alpha))
        if not use_cutmix:
            return Mix(share, None)
        h, w = (int(side * math.sqrt(1 - share)) for side in (height, width))
        y, x = random.randint(height), random.randint(width)
        top, bottom = max(y - h // 2, 0), min(y + (h + 1) // 2, height)
        left, right = max(x - w // 2, 0), min(x + (w + 1) // 2, width)
        return Mix(1 - (bottom - top) * (right - left) / (height * width), (top, bottom, left, right))


def _neighbours(x: Tensor) -> Tensor:
    """Each entry's neighbour: 1 0 3 2 5 4 …"""
    return x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1)


def _blend(x: Tensor, share: float) -> Tensor:
    return x * share + _neighbours(x) * (1 - share)
