"""Features of image files."""

from __future__ import annotations

import struct
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform, resolve_data_config
from torch import Tensor, nn
from tqdm import tqdm

# What Pillow's decoders raise on files that are damaged, foreign or too large.
UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)


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


def find_images(sources: Iterable[str | Path]) -> list[Path]:
    """The files among `sources` and all files with an image's suffix in its folders, each once.

    Files that are named are taken whatever their suffix; folders are searched recursively, in alphabetical order.
    """
    suffixes = Image.registered_extensions()
    found: dict[Path, None] = {}
    for source in map(Path, sources):
        if source.is_dir():
            inside = (p for p in sorted(source.rglob("*")) if p.suffix.lower() in suffixes and p.is_file())
            found.update(dict.fromkeys(inside))
        else:
            found[source] = None
    return list(found)


def embed_images(
    model: nn.Module,
    images: Iterable[str | Path],
    *,
    batch_size: int = 32,
    device: str | torch.device = "cpu",
    progress: bool = False,
) -> Embedding:
    """Pooled features of image files, read and normalised as the model's timm configuration says.

    The model gives one vector per image: create it with num_classes=0, or the vectors are logits. An image that cannot
    be read, or that Pillow suspects to be a decompression bomb, is skipped and named in the result.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    paths = [Path(image) for image in images]
    config = resolve_data_config(model=model)
    transform = create_transform(**config, is_training=False)
    mode = {1: "L", 3: "RGB"}.get(config["input_size"][0])
    if mode is None:
        raise ValueError(f"image files have 1 or 3 channels, the model wants {config['input_size'][0]}")
    training = model.training
    model = model.to(device).eval()
    dtype = next(model.parameters()).dtype
    features: list[np.ndarray] = []
    read: list[str] = []
    skipped: dict[str, str] = {}
    with torch.inference_mode(), tqdm(total=len(paths), unit="image", disable=not progress) as bar:
        for start in range(0, len(paths), batch_size):
            chunk = paths[start : start + batch_size]
            batch = []
            for path in chunk:
                try:
                    batch.append(_read(path, mode, transform))
                    read.append(str(path))
                except UNREADABLE as error:
                    skipped[str(path)] = " ".join(f"{type(error).__name__}: {error}".split())
            if batch:
                output = model(torch.stack(batch).to(device, dtype))
                features.append(output.float().cpu().numpy())
            bar.update(len(chunk))
    model.train(training)
    width = getattr(model, "num_features", 0)
    stacked = np.concatenate(features) if features else np.zeros((0, width), np.float32)
    return Embedding(stacked, tuple(read), skipped)


def _read(path: Path, mode: str, transform: Callable[[Image.Image], Tensor]) -> Tensor:
    with warnings.catch_warnings():
        # Pillow only warns up to twice its limit; the limit is meant.
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        with Image.open(path) as image:
            return transform(image.convert(mode))
