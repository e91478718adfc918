"""Where samples come from: image folders, shards, the sets of libraries, and the digits that need no download."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image

from quickvit.data.images import read_image, walk_images

DIGITS = "digits"
# The folder names of each split, best first; "all" is the folder itself.
SPLITS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test"), "test": ("test",)}
UNLABELLED = -1


class Sample(NamedTuple):
    """An RGB image and its class, −1 where there is none."""

    image: Image.Image
    target: int


class Source(Protocol):
    """Samples by number; cheap to pickle, since every worker gets a copy."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, none where samples are unlabelled."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """One sample; raises `Unreadable` where its image cannot be used."""
        ...

    def describe(self, index: int) -> str:
        """The path or name of a sample, for messages."""
        ...


def open_source(spec: str | Path = DIGITS, split: str = "train", *, labelled: bool = True) -> Source:
    """The samples of a split.

    spec: a folder, or "digits" for scikit-learn's 1,797 handwritten digits.
    split: "train", "val", "test", or "all" for the folder itself, whatever its folders are called.
    labelled: with False, any folder of images will do, and the targets are −1.
    """
    if split not in (*SPLITS, "all"):
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join((*SPLITS, 'all'))}")
    if str(spec) == DIGITS:
        return DigitsSource.open(split)
    return FolderSource.open(Path(spec), split, labelled=labelled)


# ---------------------------------------------------------------------- folders


@dataclass(frozen=True)
class FolderSource:
    """Image files below `root`; their paths are one array, which forked workers share."""

    name: str
    root: str
    paths: np.ndarray
    targets: np.ndarray
    classes: tuple[str, ...]

    @classmethod
    def open(cls, folder: Path, split: str, *, labelled: bool = True) -> FolderSource:
        """A split of a folder: FOLDER/SPLIT/CLASS/…/image, or any nesting where labels are not asked for."""
        root = _split_folder(folder, split)
        paths = walk_images(root)
        if not paths:
            raise ValueError(f"no images in {root}")
        if not labelled:
            return cls._build(root, paths, [UNLABELLED] * len(paths), ())
        own = _class_names(root)
        names = [path.split(os.sep, 1)[0] for path in paths]
        if stray := [path for path, name in zip(paths, names, strict=True) if path == name]:
            raise ValueError(
                f"{root / stray[0]} lies in no class folder; expected {root / 'CLASS' / stray[0]}"
            )
        classes = own
        training = None if split in ("train", "all") else _find_split(folder, "train")
        if training is not None:
            classes = _class_names(training)
            _require_same_classes(own, classes, root, training)
        elif empty := sorted(set(classes) - set(names)):
            raise ValueError(f"no images of a class in {root / empty[0]}")
        number = {name: i for i, name in enumerate(classes)}
        return cls._build(root, paths, [number[name] for name in names], classes)

    @classmethod
    def _build(
        cls, root: Path, paths: Sequence[str], targets: Sequence[int], classes: tuple[str, ...]
    ) -> FolderSource:
        encoded = np.array([os.fsencode(path) for path in paths])
        return cls(str(root), str(root), encoded, np.array(targets, dtype=np.int64), classes)

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Sample:
        """One sample; raises `Unreadable`."""
        return Sample(read_image(self.describe(index)), int(self.targets[index]))

    def describe(self, index: int) -> str:
        """The path of an image."""
        return os.path.join(self.root, os.fsdecode(self.paths[index]))


def _find_split(folder: Path, split: str) -> Path | None:
    return next((folder / name for name in SPLITS[split] if (folder / name).is_dir()), None)


def _split_folder(folder: Path, split: str) -> Path:
    """Where a split lies; a folder without any split is its own training split."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    if split == "all":
        return folder
    found = _find_split(folder, split)
    if found is not None:
        return found
    if split == "train" and all(_find_split(folder, name) is None for name in SPLITS):
        return folder
    expected = ", ".join(str(folder / name) for name in SPLITS[split])
    raise FileNotFoundError(f"{folder} has no {split} split: expected one of {expected}")


def _class_names(root: Path) -> tuple[str, ...]:
    return tuple(
        sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    )


def _require_same_classes(
    own: Sequence[str], training: Sequence[str], root: Path, training_root: Path
) -> None:
    if unknown := sorted(set(own) - set(training)):
        raise ValueError(f"{root / unknown[0]} is a class that {training_root} does not have")
    if missing := sorted(set(training) - set(own)):
        raise ValueError(
            f"{root} lacks {len(missing)} of the {len(training)} classes of {training_root}: no {root / missing[0]}; "
            "make an empty folder for a class that shall have no images"
        )


# ---------------------------------------------------------------------- digits


@dataclass(frozen=True)
class DigitsSource:
    """scikit-learn's handwritten digits, 8 × 8 pixels; 360 of the 1,797, each class in proportion, are for "val"."""

    name: str
    images: np.ndarray
    targets: np.ndarray
    numbers: np.ndarray
    classes: tuple[str, ...] = tuple(map(str, range(10)))

    @classmethod
    def open(cls, split: str) -> DigitsSource:
        """A split of the digits; "test" is the same as "val"."""
        try:
            from sklearn.datasets import load_digits
            from sklearn.model_selection import train_test_split
        except ModuleNotFoundError as error:
            message = 'the digits need scikit-learn: pip install "quickvit[demo]"'
            raise ModuleNotFoundError(message, name=error.name) from error
        data = load_digits()
        numbers = np.arange(len(data.target))
        if split != "all":
            parts = train_test_split(numbers, test_size=360, random_state=0, stratify=data.target)
            numbers = np.sort(parts[split != "train"])
        images = np.rint(data.images[numbers] * (255 / 16)).astype(np.uint8)
        return cls(f"digits ({split})", images, data.target[numbers].astype(np.int64), numbers)

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, index: int) -> Sample:
        """One sample."""
        return Sample(Image.fromarray(self.images[index]).convert("RGB"), int(self.targets[index]))

    def describe(self, index: int) -> str:
        """The digit's number in scikit-learn's set."""
        return f"digit {self.numbers[index]}"
