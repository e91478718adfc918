"""Splits that are listed in files: the path and the class of an image in every line."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePath

import numpy as np

from quickvit.data.sources.folder import FolderSource

# What the columns of a CSV file may be called, in small letters.
PATH_COLUMNS = ("image path", "image_path", "path", "image", "file", "filename")
CLASS_COLUMNS = ("label", "class", "target")


def open_listed(
    listing: str | Path, folder: str | Path, classes: Sequence[str] | None = None
) -> FolderSource:
    """The images below `folder` that a file lists; without `classes`, those that occur in it are the classes.

    A CSV file has a header with a column of paths ("Image Path", "path", "file", …) and one of classes ("Label",
    "class", …). Any other file has a path in every line, and the class after it. Where no class is given, it is the
    first folder on the way to the image.
    """
    listing, folder = Path(listing), Path(folder)
    try:
        rows = list(_read_csv(listing) if listing.suffix.lower() == ".csv" else _read_text(listing, folder))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{listing} is no list of images in UTF-8: {error}") from error
    if not rows:
        raise ValueError(f"{listing} lists no images")
    known = sorted({name for _, _, name in rows}) if classes is None else list(classes)
    numbers = {name: i for i, name in enumerate(known)}
    for line, path, name in rows:
        if PurePath(path).is_absolute() or ".." in PurePath(path).parts:
            raise ValueError(f"{listing}, line {line}: expected a path below {folder}, got {path!r}")
        if not (folder / path).is_file():
            raise FileNotFoundError(f"{listing}, line {line}: no file {folder / path}")
        if not name:
            raise ValueError(f"{listing}, line {line}: {path} has no class, and lies in no folder of one")
        if name not in numbers:
            raise ValueError(
                f"{listing}, line {line}: {path} is of the class {name!r}, of which there is nothing to learn from"
            )
    paths = np.array([os.fsencode(path) for _, path, _ in rows])
    targets = np.array([numbers[name] for _, _, name in rows], dtype=np.int64)
    return FolderSource(str(listing), str(folder), paths, targets, tuple(known))


Row = tuple[int, str, str]


def _read_csv(listing: Path) -> Iterator[Row]:
    with listing.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.DictReader(file)
        columns = {name.strip().lower(): name for name in reader.fieldnames or ()}
        path_column = next((columns[name] for name in PATH_COLUMNS if name in columns), None)
        class_column = next((columns[name] for name in CLASS_COLUMNS if name in columns), None)
        if path_column is None:
            found = ", ".join(columns) or "none"
            raise ValueError(
                f"{listing} has no column of paths: expected one of {', '.join(PATH_COLUMNS)} in the first "
                f"line, got {found}"
            )
        for row in reader:
            path = (row[path_column] or "").strip()
            name = _first_folder(path) if class_column is None else (row[class_column] or "").strip()
            yield reader.line_num, path, name


def _read_text(listing: Path, folder: Path) -> Iterator[Row]:
    for number, text in enumerate(listing.read_text(encoding="utf-8-sig").splitlines(), 1):
        line = text.strip()
        if not line:
            continue
        if len(words := line.rsplit(maxsplit=1)) == 1 or (folder / line).is_file():
            yield number, line, _first_folder(line)
        else:
            yield number, words[0], words[1]


def _first_folder(path: str) -> str:
    return PurePath(path).parts[0] if len(PurePath(path).parts) > 1 else ""
