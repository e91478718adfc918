"""Decoded images in memory, for sets of small images whose files cost more to open than to augment."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from PIL import Image
from torch import Tensor
from tqdm import tqdm

from quickvit.data.images import Unreadable
from quickvit.data.sources.base import Sample, Source


@dataclass(frozen=True, eq=False)
class CachedSource:
    """Another source, all of whose images were read once; workers share the memory."""

    source: Source
    pixels: Tensor
    # For each sample the end of its pixels, height, width and target.
    table: Tensor
    # Path and reason: an error itself would keep every place at which it was raised.
    unreadable: dict[int, tuple[str, str]]

    @property
    def name(self) -> str:
        """The other source's."""
        return self.source.name

    @property
    def classes(self) -> tuple[str, ...]:
        """The other source's."""
        return self.source.classes

    @property
    def files(self) -> tuple[str, ...]:
        """The other source's."""
        return tuple(getattr(self.source, "files", ()))

    @property
    def fingerprint(self) -> str:
        """The other source's."""
        return getattr(self.source, "fingerprint", "")

    @property
    def distinct(self) -> int:
        """The other source's."""
        return getattr(self.source, "distinct", len(self))

    def __len__(self) -> int:
        return len(self.table)

    def read(self, index: int) -> Sample:
        """One sample; raises `Unreadable` as the other source did."""
        pixels, target = self.read_bytes(index)
        height, width, _ = pixels.shape
        return Sample(Image.frombytes("RGB", (width, height), pixels.numpy()), target)

    def read_bytes(self, index: int) -> tuple[Tensor, int]:
        """The same with the image as it is stored, bytes [H, W, 3]."""
        if index in self.unreadable:
            raise Unreadable(*self.unreadable[index])
        end, height, width, target = self.table[index].tolist()
        return self.pixels[end - height * width * 3 : end].view(height, width, 3), target

    def describe(self, index: int) -> str:
        """The other source's."""
        return self.source.describe(index)


def cache(source: Source, limit: int = 2**34) -> CachedSource:
    """Read all images of a source into memory; more than `limit` bytes are a ValueError."""
    pixels, rows, unreadable = bytearray(), [], {}
    for index in tqdm(range(len(source)), desc=f"reading {source.name}", unit="image"):
        try:
            image, target = source.read(index)
            pixels += image.tobytes()
            rows.append((len(pixels), image.height, image.width, target))
        except Unreadable as error:
            unreadable[index] = error.path, error.reason
            rows.append((len(pixels), 0, 0, -1))
        if len(pixels) > limit:
            raise ValueError(
                f"the first {index + 1} of the {len(source)} images of {source.name} fill "
                f"{len(pixels) / 2**30:.1f} GiB, more than {limit / 2**30:.1f}; do not cache them"
            )
    # Tensors, since those go to workers as shared memory even where they are not forked.
    stored = torch.frombuffer(pixels, dtype=torch.uint8) if pixels else torch.empty(0, dtype=torch.uint8)
    return CachedSource(source, stored, torch.tensor(rows), unreadable)
