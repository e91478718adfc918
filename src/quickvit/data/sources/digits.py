"""Handwritten digits that come with scikit-learn: real data without a download."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image

from quickvit.data.sources.base import ALL, Sample

# As many as in the demonstration.
HELD_OUT = 360


@dataclass(frozen=True, eq=False)
class DigitsSource:
    """Digits of 8 × 8 pixels; `numbers` are their places in scikit-learn's set."""

    name: str
    images: np.ndarray
    targets: np.ndarray
    numbers: np.ndarray
    classes: tuple[str, ...] = tuple(map(str, range(10)))

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, index: int) -> Sample:
        """One sample."""
        return Sample(Image.fromarray(self.images[index]).convert("RGB"), int(self.targets[index]))

    def describe(self, index: int) -> str:
        """The digit's place in scikit-learn's set."""
        return f"digit {self.numbers[index]}"


def open_digits(split: str) -> DigitsSource:
    """A split of the 1,797 digits: 360 of them, every class in proportion, are both "val" and "test"."""
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ModuleNotFoundError as error:
        message = 'the digits need scikit-learn: pip install "quickvit[demo]"'
        raise ModuleNotFoundError(message, name=error.name) from error
    data = load_digits()
    numbers = np.arange(len(data.target))
    if split != ALL:
        kept, held_out = train_test_split(numbers, test_size=HELD_OUT, random_state=0, stratify=data.target)
        numbers = np.sort(kept if split == "train" else held_out)
    images = np.rint(data.images[numbers] * (255 / 16)).astype(np.uint8)
    return DigitsSource(f"digits ({split})", images, data.target[numbers].astype(np.int64), numbers)
