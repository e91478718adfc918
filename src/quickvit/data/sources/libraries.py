"""Data sets that other libraries read: torchvision's and Hugging Face's, through timm."""

from __future__ import annotations

import os
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from timm.data import create_dataset

from quickvit.data.images import decoding, read_image, to_rgb
from quickvit.data.sources.base import ALL, SPLITS, UNLABELLED, Sample

# Where torchvision's data sets keep the names of their classes.
CLASS_NAMES = ("wnids", "classes", "all_categories")


@dataclass(frozen=True, eq=False)
class TorchvisionSource:
    """A data set of torchvision that gives images and numbers of classes."""

    name: str
    dataset: Any
    classes: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """What the data set reads, where its images are no files that it lists: all in its folder."""
        if hasattr(self.dataset, "imgs"):
            return ()
        # MNIST and CIFAR have folders of their own below the one that they were given.
        inner = os.path.join(self.dataset.root, getattr(self.dataset, "base_folder", ""))
        folder = Path(getattr(self.dataset, "raw_folder", inner))
        return tuple(sorted(str(path) for path in folder.rglob("*") if path.is_file()))

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, index: int) -> Sample:
        """One sample; raises `Unreadable`."""
        with decoding(self.describe(index)):
            image, target = self.dataset[index]
            return Sample(to_rgb(image), int(target) if self.classes else UNLABELLED)

    def describe(self, index: int) -> str:
        """The path of the image where there is one, else its number."""
        paths = getattr(self.dataset, "imgs", None)
        return f"{self.name}, image {index}" if paths is None else str(paths[index][0])


@dataclass(frozen=True, eq=False)
class HuggingFaceSource:
    """A data set of Hugging Face with the columns `image` and `label`."""

    name: str
    reader: Any
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.reader)

    def read(self, index: int) -> Sample:
        """One sample; raises `Unreadable`."""
        name = self.describe(index)
        with decoding(name):
            file, target = self.reader[index]
        with file:
            return Sample(read_image(file, name), int(target) if self.classes else UNLABELLED)

    def describe(self, index: int) -> str:
        """The number of the image."""
        return f"{self.name}, image {index}"

    @property
    def fingerprint(self) -> str:
        """What datasets makes of the content and of all that was done to it."""
        return getattr(self.reader.dataset, "_fingerprint", "")


def open_torchvision(name: str, root: str | None, split: str, *, labelled: bool = True) -> TorchvisionSource:
    """torchvision's CIFAR, MNIST, ImageNet, Places365, iNaturalist 2021 …, downloaded before into a folder."""
    spec = f"torch/{name}"
    if root is None:
        raise ValueError(f"{spec} needs the folder with its files: {spec}@FOLDER")
    if split == ALL:
        raise ValueError(f"{spec} has the splits {', '.join(SPLITS)}, not {split!r}")
    try:
        # These sets have two parts, which timm finds by these words.
        dataset = create_dataset(spec, root=root, split="train" if split == "train" else "validation")
    except AssertionError as error:
        raise ValueError(f"timm knows no {spec}: {error}") from error
    except RuntimeError as error:
        raise FileNotFoundError(f"cannot open {spec} in {root}: {error}") from error
    if hasattr(dataset, "loader"):
        # Its own reads formats that run programs, and clips 16 bits.
        dataset.loader = read_image
    names: Any = next((found for key in CLASS_NAMES if (found := getattr(dataset, key, None))), ())
    return TorchvisionSource(f"{spec} ({split})", dataset, tuple(map(str, names)) if labelled else ())


def open_hugging_face(name: str, root: str | None, split: str, *, labelled: bool = True) -> HuggingFaceSource:
    """A data set of the Hugging Face Hub or of a folder in its format; `root` is where downloads are kept."""
    if find_spec("datasets") is None:
        raise ModuleNotFoundError(
            f'hfds/{name} needs Hugging Face\'s datasets: pip install "quickvit[datasets]"', name="datasets"
        )
    from datasets import get_dataset_split_names
    from timm.data.readers.reader_hfds import ReaderHfds

    available = get_dataset_split_names(name)
    own = next((word for word in SPLITS.get(split, ()) if word in available), None)
    if own is None:
        raise FileNotFoundError(
            f"hfds/{name} has the splits {', '.join(available)}, none of them is {split!r}"
        )
    try:
        reader = ReaderHfds(name=name, root=root, split=own)
    except KeyError as error:
        raise ValueError(f"hfds/{name} needs the columns image and label, it has no {error}") from error
    classes = tuple(reader.class_to_idx)
    if labelled and not classes:
        raise ValueError(f"hfds/{name} has no column `label` with the names of classes")
    return HuggingFaceSource(f"hfds/{name} ({own})", reader, classes if labelled else ())
