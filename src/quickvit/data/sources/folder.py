"""Folders of image files."""

from __future__ import annotations

import os
from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path, PurePath

import numpy as np

from quickvit.data.images import read_image, walk_images
from quickvit.data.sources.base import ALL, MOST_DIGITS, SPLITS, UNLABELLED, Sample, numbered

# The classes in the order of a model's outputs, one name in a line.
CLASS_LIST = "classes.txt"
# Classes for each number in use up to which a list of numbers may leave some out.
MOST_GAPS = 10


@dataclass(frozen=True, eq=False)
class FolderSource:
    """Image files below `root`; their paths are one array, which forked workers share."""

    name: str
    root: str
    paths: np.ndarray
    targets: np.ndarray
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.paths)

    def read(self, index: int) -> Sample:
        """One sample; raises `Unreadable`."""
        return Sample(read_image(self.describe(index)), int(self.targets[index]))

    def describe(self, index: int) -> str:
        """The path of an image."""
        return os.path.join(self.root, os.fsdecode(self.paths[index]))


def open_folder(folder: Path, split: str, *, labelled: bool = True) -> FolderSource:
    """The images of FOLDER/SPLIT, in folders of their classes or listed in FOLDER/SPLIT.txt; see docs/data.md.

    A list has the name of the folder that was found: test.txt says nothing of val/.

    Without `labelled` every image below FOLDER/SPLIT counts, however it is nested.
    """
    root = _split_folder(folder, split, labelled=labelled)
    if not labelled:
        paths = _require_images(walk_images(root), root)
        return _source(root, paths, [UNLABELLED] * len(paths), ())
    listing = _listing(folder, SPLITS.get(split, ()) if root == folder else (root.name,))
    if listing is None:
        return _from_class_folders(folder, root, split)
    return _from_listing(folder, root, listing)


def _from_class_folders(folder: Path, root: Path, split: str) -> FolderSource:
    """FOLDER/SPLIT/CLASS/…/image: the first folder on the way to an image is its class."""
    paths = _require_images(walk_images(root), root)
    names = [path.split(os.sep, 1)[0] for path in paths]
    if stray := [path for path, name in zip(paths, names, strict=True) if path == name]:
        raise ValueError(
            f"{root / stray[0]} lies in no folder of a class; expected {root / 'CLASS' / stray[0]}, or "
            f"{folder / f'{split}.txt'} with a path and a class in each line"
        )
    declared = read_class_list(folder)
    origin = (_find_split(folder, "train") if split != ALL else None) or root
    classes = declared or _class_folders(origin)
    # A class must have images where it is learned; where it is tested, an empty folder will do.
    present = names if origin == root else _class_folders(root)
    if unknown := sorted(set(present) - set(classes)):
        known = folder / CLASS_LIST if declared else origin
        raise ValueError(f"{root / unknown[0]} is a class that {known} does not have")
    if not declared and (missing := sorted(set(classes) - set(present))):
        raise ValueError(
            f"{root} lacks {len(missing)} of the {len(classes)} classes of {origin}: nothing in "
            f"{root / missing[0]}; name the classes in {folder / CLASS_LIST} if that is meant"
        )
    number = {name: i for i, name in enumerate(classes)}
    return _source(root, paths, [number[name] for name in names], classes)


def _from_listing(folder: Path, root: Path, listing: Path) -> FolderSource:
    """Lines of a path below FOLDER/SPLIT and a class: its name, or its number among those of the training split."""
    rows = _read_listing(listing, root)
    training = _find_split(folder, "train")
    classes = read_class_list(folder) or (_class_folders(training) if training is not None else ())
    if not classes:
        learned = _listing(folder, SPLITS["train"] if training is None else (training.name,))
        named = rows if learned in (None, listing) else _read_listing(learned, training or folder)
        classes = _classes_of({label for _, label in named}, listing)
    targets = {name: i for i, name in enumerate(classes)}
    for label in {label for _, label in rows} - targets.keys():
        if not (label.isdecimal() and int(label) < len(classes)):
            raise ValueError(
                f"{listing}: {label!r} is neither one of the {len(classes)} classes nor its number"
            )
        targets[label] = int(label)
    paths = _require_images([path for path, _ in rows], listing)
    return _source(root, paths, [targets[label] for _, label in rows], classes)


def _read_listing(listing: Path, root: Path) -> list[tuple[str, str]]:
    """The path and the class of each line."""
    rows = []
    for number, line in enumerate(_lines(listing), 1):
        match line.rsplit(maxsplit=1):
            case [path, label] if not (PurePath(path).is_absolute() or ".." in PurePath(path).parts):
                rows.append((path, label))
            case []:
                continue
            case _:
                raise ValueError(
                    f"{listing}, line {number}: expected a path below {root} and a class, got {line!r}"
                )
    return rows


def _classes_of(labels: Set[str], listing: Path) -> tuple[str, ...]:
    """The classes of labels: in the order of their names, or if all are numbers those up to the largest."""
    if not labels or not all(label.isdecimal() and len(label) <= MOST_DIGITS for label in labels):
        return tuple(sorted(labels))
    classes = numbered(max(map(int, labels)))
    if len(classes) > MOST_GAPS * len(labels):
        raise ValueError(
            f"{listing}: {len(labels)} different numbers up to {classes[-1]} are names of classes rather than their "
            f"numbers; list them in {CLASS_LIST}, one in a line, in the order of a model's outputs"
        )
    return classes


def _source(
    root: Path, paths: Sequence[str], targets: Sequence[int], classes: tuple[str, ...]
) -> FolderSource:
    encoded = np.array([os.fsencode(path) for path in paths])
    return FolderSource(str(root), str(root), encoded, np.array(targets, dtype=np.int64), classes)


# ---------------------------------------------------------------------- what lies where


def read_class_list(folder: Path) -> tuple[str, ...]:
    """The names in FOLDER/classes.txt, none if there is no such file."""
    file = folder / CLASS_LIST
    if not file.is_file():
        return ()
    names = tuple(line.strip() for line in _lines(file) if line.strip())
    if len(set(names)) < len(names) or not names:
        raise ValueError(
            f"{file} must name each class once, got {len(names)} names, {len(set(names))} of them different"
        )
    return names


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{file} must be text in UTF-8: {error}") from error


def _find_split(folder: Path, split: str) -> Path | None:
    """The folder of a split. Train and TRAIN are called train too, and no classes."""
    with os.scandir(folder) as entries:
        names = sorted(
            entry.name for entry in entries if entry.name.lower() in SPLITS[split] and entry.is_dir()
        )
    # Of several that differ by that only the last counts, which is the one in small letters.
    found = {name.lower(): folder / name for name in names}
    return next((found[name] for name in SPLITS[split] if name in found), None)


def _split_folder(folder: Path, split: str, *, labelled: bool) -> Path:
    """Where the images of a split lie; a folder without any split is its own training split."""
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    found = None if split == ALL else _find_split(folder, split)
    if found is not None:
        return found
    parts = [name for name in SPLITS if _find_split(folder, name) is not None]
    if split == ALL and labelled and parts:
        raise ValueError(
            f"{folder} has the splits {', '.join(parts)}; take one of them, or a folder of classes"
        )
    if split == ALL or (split == "train" and not parts):
        return folder
    expected = ", ".join(str(folder / name) for name in SPLITS[split])
    instead = f"it has {', '.join(parts)}" if parts else f"the split {ALL!r} takes {folder} as it is"
    raise FileNotFoundError(f"{folder} has no {split} split: expected one of {expected}; {instead}")


def _listing(folder: Path, names: Sequence[str]) -> Path | None:
    return next((file for name in names if (file := folder / f"{name}.txt").is_file()), None)


def _class_folders(root: Path) -> tuple[str, ...]:
    return tuple(
        sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    )


def _require_images(paths: list[str], where: Path) -> list[str]:
    if not paths:
        raise ValueError(f"no images in {where}")
    return paths
