"""Features of image files."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

from quickvit.data import Unreadable, preprocessing, read_image


@dataclass(frozen=True)
class Embedding:
    """Features [n, C] of the images at `paths`, and why each of the others was skipped."""

    features: np.ndarray
    paths: tuple[str, ...]
    skipped: dict[str, str]

    def save(self, path: str | Path) -> None:
        """Write `features` and `paths` to an npz file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            np.savez(file, features=self.features, paths=np.array(self.paths, dtype=np.str_))


def embed_images(
    model: nn.Module,
    images: str | Path | Iterable[str | Path],
    *,
    batch_size: int = 32,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> Embedding:
    """Pooled features of image files, read and normalised as the model's timm configuration says.

    The model is moved to `device` and gives one vector per image; with num_classes=0 that is its pooled
    features. An image that cannot be read, or that Pillow suspects to be a decompression bomb, is skipped and
    named in the result. One with outputs that are not finite is a ValueError.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    paths = [Path(image) for image in ([images] if isinstance(images, str | Path) else images)]
    transform = preprocessing(model)
    training = model.training
    model = model.to(device).eval()
    dtype = next(model.parameters()).dtype
    features: list[np.ndarray] = []
    read: list[str] = []
    skipped: dict[str, str] = {}
    try:
        with torch.no_grad(), tqdm(total=len(paths), unit="image", disable=not progress) as bar:
            for start in range(0, len(paths), batch_size):
                chunk = paths[start : start + batch_size]
                batch = []
                for path in chunk:
                    try:
                        batch.append(transform(read_image(path)))
                        read.append(str(path))
                    except Unreadable as error:
                        skipped[error.path] = error.reason
                if batch:
                    vectors = _vectors(model(torch.stack(batch).to(device, dtype))).float().cpu()
                    for name, vector in zip(read[-len(batch) :], vectors, strict=True):
                        if not vector.isfinite().all():
                            raise ValueError(f"the model gives {name} outputs that are not finite")
                    features.append(vectors.numpy())
                bar.update(len(chunk))
    finally:
        model.train(training)
    width = getattr(model, "num_features", 0)
    stacked = np.concatenate(features) if features else np.zeros((0, width), np.float32)
    return Embedding(stacked, tuple(read), skipped)


def _vectors(output: Tensor) -> Tensor:
    if output.ndim != 2:
        raise ValueError(
            f"the model gives {tuple(output.shape[1:])} for an image, expected one vector; create it with "
            "global_pool='token' or 'avg'"
        )
    return output
