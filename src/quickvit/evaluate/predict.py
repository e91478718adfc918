"""The answers of a classifier to image files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quickvit.evaluate.features import embed_images
from quickvit.evaluate.labels import class_names
from quickvit.models.declared import unwrapped


@dataclass(frozen=True)
class Answers:
    """Shares [n, classes] of the classes for the images at `paths`, and why each of the others was skipped."""

    shares: Tensor
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    skipped: dict[str, str]

    def best(self, number: int = 1) -> list[list[tuple[str, float]]]:
        """The names and shares of each image's best classes, best first."""
        shares, classes = self.shares.topk(min(number, len(self.classes)))
        return [
            [(self.classes[i], share) for i, share in zip(row, values, strict=True)]
            for row, values in zip(classes.tolist(), shares.tolist(), strict=True)
        ]


def predict_images(model: nn.Module, images: str | Path | Iterable[str | Path], **options: Any) -> Answers:
    """The softmax of a model's outputs for image files; `options` are those of `embed_images`.

    Classes have the names of the data that a checkpoint was trained on, else their numbers.
    """
    number: int = getattr(unwrapped(model), "num_classes", 0)
    if not number:
        raise ValueError(
            "the model has no head, num_classes is 0: train one, or use embed_images for its features"
        )
    found = embed_images(model, images, **options)
    classes = class_names(model) or tuple(map(str, range(number)))
    shares = torch.from_numpy(found.features).softmax(-1) if found.paths else torch.zeros(0, number)
    return Answers(shares, classes, found.paths, found.skipped)
