"""Images with a label for every pixel: ADE20K, PASCAL VOC 2012, and any folder with images/ and annotations/."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from quickvit.data.images import Unreadable, decoding, open_image, read_image, walk_images
from quickvit.data.sources.base import SPLITS, UNLABELLED, Sample
from quickvit.data.sources.folder import read_class_list

# Pillow's modes in which a pixel is a whole number: one bit, grey, palette, and 16 or 32 bits that hold 8.
MASK_MODES = ("1", "L", "P", "I", "I;16", "I;16L", "I;16B", "I;16N")
# The names of the release, and what its labels mean: 0 is "other", 1 … 150 are the classes.
ADE20K, ADE20K_NAMES, ADE20K_LABELS = "ADEChallengeData2016", "objectInfo150.txt", 151
VOC = "VOCdevkit/VOC2012"
VOC_NAMES = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("dining table", "dog", "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train"),
    "tv/monitor",
)
UNNAMED = 255


@dataclass(frozen=True, eq=False)
class SegmentationSource:
    """Images as an unlabelled source, and a mask for each.

    labels: the names of the labels 0, 1, …; none if any number below 255 will do.
    ignored: labels in the files that mean nothing: they are neither learned nor counted.
    """

    name: str
    images: np.ndarray
    masks: np.ndarray
    labels: tuple[str, ...]
    ignored: tuple[int, ...]
    classes: tuple[str, ...] = ()

    @property
    def void(self) -> tuple[int, ...]:
        """The ignored labels in the masks that are read: 255 stands for those that uint8 cannot hold."""
        return tuple(dict.fromkeys(UNNAMED if self._is_wide(label) else label for label in self.ignored))

    def __len__(self) -> int:
        return len(self.images)

    def read(self, index: int) -> Sample:
        """One image; raises `Unreadable`."""
        return Sample(read_image(self.describe(index)), UNLABELLED)

    def describe(self, index: int) -> str:
        """The path of an image."""
        return os.fsdecode(self.images[index])

    def describe_mask(self, index: int) -> str:
        """The path of a mask."""
        return os.fsdecode(self.masks[index])

    def read_mask(self, index: int, size: tuple[int, int] | None = None) -> np.ndarray:
        """The labels [H, W] of an image, uint8; resized to the nearest if a size is given.

        A mask that cannot be read or does not fit its image is a ValueError that names the file.
        """
        path = self.describe_mask(index)
        try:
            with decoding(path), open_image(path) as file:
                mask = file.copy()
        except Unreadable as error:
            raise ValueError(f"cannot read {error}") from error
        try:
            with decoding(self.describe(index)), open_image(self.describe(index)) as image:
                expected = image.size
        except Unreadable:
            # Whoever reads the image says so, and maybe does without it.
            expected = mask.size
        if mask.mode not in MASK_MODES:
            raise ValueError(
                f"{path} has mode {mask.mode}, which holds colours; a mask holds a label for every pixel "
                f"(mode 1, L or P)"
            )
        if mask.size != expected:
            sizes = [f"{width}×{height}" for width, height in (mask.size, expected)]
            raise ValueError(f"{path} has {sizes[0]} pixels, its image {self.describe(index)} {sizes[1]}")
        if size is not None:
            mask = mask.resize(size[::-1], Image.Resampling.NEAREST)
        return self._checked(np.array(mask), path)

    def _checked(self, mask: np.ndarray, path: str) -> np.ndarray:
        known = len(self.labels) or UNNAMED
        for label in map(int, np.unique(mask)):
            if not 0 <= label < known and label not in self.ignored:
                ignored = ", ".join(map(str, self.ignored)) or "none"
                raise ValueError(
                    f"{path} has the label {label}; expected 0 … {known - 1}, or one that is ignored ({ignored})"
                )
        wide = np.isin(mask, [label for label in self.ignored if self._is_wide(label)])
        return np.where(wide, UNNAMED, mask).astype(np.uint8)

    @staticmethod
    def _is_wide(label: int) -> bool:
        return not 0 <= label <= UNNAMED


def open_segmentation(
    folder: str | Path, split: str = "train", *, ignored: Sequence[int] | None = None
) -> SegmentationSource:
    """A split ("train", "val" or "test") of a folder of images and masks.

    ADE20K as released (ignores 0 and 255), PASCAL VOC 2012 as released (ignores 255), or any folder with
    images/SPLIT/… and annotations/SPLIT/… in which mask and image differ by their suffix only (ignores 255). There,
    classes.txt may name the labels. `ignored` replaces these labels.
    """
    folder = Path(folder)
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}; expected one of {', '.join(SPLITS)}")
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    ade, voc = (folder / inner if (folder / inner).is_dir() else folder for inner in (ADE20K, VOC))
    if (voc / "SegmentationClass").is_dir():
        return _open_voc(voc, split, (255,) if ignored is None else ignored)
    if (ade / ADE20K_NAMES).is_file():
        names = _ade20k_names(ade / ADE20K_NAMES)
        return _open_folder(ade, split, names, (0, 255) if ignored is None else ignored)
    return _open_folder(folder, split, read_class_list(folder), (255,) if ignored is None else ignored)


def _open_folder(
    folder: Path, split: str, labels: tuple[str, ...], ignored: Sequence[int]
) -> SegmentationSource:
    names = [name for name in SPLITS[split] if (folder / "images" / name).is_dir()]
    if not names:
        expected = ", ".join(str(folder / "images" / name) for name in SPLITS[split])
        raise FileNotFoundError(f"{folder} has no {split} split with masks: expected one of {expected}")
    images, masks = folder / "images" / names[0], folder / "annotations" / names[0]
    paths = walk_images(images)
    return _source(images, paths, [masks / Path(path).with_suffix(".png") for path in paths], labels, ignored)


def _open_voc(folder: Path, split: str, ignored: Sequence[int]) -> SegmentationSource:
    lists = [folder / "ImageSets" / "Segmentation" / f"{name}.txt" for name in SPLITS[split]]
    listing = next((file for file in lists if file.is_file()), None)
    if listing is None:
        raise FileNotFoundError(f"{folder} has no {split} split: expected {lists[0]}")
    names = listing.read_text(encoding="utf-8-sig").split()
    if outside := next((name for name in names if Path(name).name != name), None):
        raise ValueError(f"{listing} names {outside!r}; expected names of images without folder and suffix")
    images = folder / "JPEGImages"
    masks = [folder / "SegmentationClass" / f"{name}.png" for name in names]
    return _source(images, [f"{name}.jpg" for name in names], masks, VOC_NAMES, ignored)


def _source(
    folder: Path, paths: Sequence[str], masks: Sequence[Path], labels: tuple[str, ...], ignored: Sequence[int]
) -> SegmentationSource:
    if not paths:
        raise ValueError(f"no images in {folder}")
    if len(labels) > UNNAMED:
        raise ValueError(f"{folder} has {len(labels)} named labels; expected at most {UNNAMED}")
    if missing := next((pair for pair in zip(paths, masks, strict=True) if not pair[1].is_file()), None):
        raise FileNotFoundError(f"{folder / missing[0]} has no mask: expected {missing[1]}")
    images = [os.fsencode(folder / path) for path in paths]
    return SegmentationSource(
        str(folder), np.array(images), np.array([os.fsencode(mask) for mask in masks]), labels, tuple(ignored)
    )


def _ade20k_names(file: Path) -> tuple[str, ...]:
    """The names in the release's table, whose columns end with one, after the name of label 0."""
    lines = file.read_text(encoding="utf-8").splitlines()[1:]
    names = tuple(line.split("\t")[-1].split(",")[0].strip() for line in lines if line.strip())
    if len(names) != ADE20K_LABELS - 1:
        raise ValueError(f"{file} names {len(names)} classes, expected {ADE20K_LABELS - 1}")
    return ("other", *names)
