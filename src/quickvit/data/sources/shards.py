"""Shards of the WebDataset format: tar files in which the files of a sample share their name.

They are read at random places instead of as streams, since only then a batch can be a function of its step; so they
must be files, uncompressed, on a disk that is good at that.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from quickvit.data.images import Unreadable, image_suffixes, read_image
from quickvit.data.sources.base import ALL, MOST_DIGITS, SPLITS, UNLABELLED, Sample, numbered
from quickvit.data.sources.folder import read_class_list

LABEL = ".cls"
INFO = ("_info.json", "info.json")
# What each word stands for in the name of a shard; "test" serves for validation, and is still a test split.
OWN_SPLIT = {word: split for split, words in SPLITS.items() for word in words}


@dataclass(frozen=True, eq=False)
class ShardSource:
    """Samples of tar files: for each its shard, the place and the size of its image there, and its key."""

    name: str
    shards: tuple[str, ...]
    where: np.ndarray
    keys: np.ndarray
    targets: np.ndarray
    classes: tuple[str, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The shards."""
        return self.shards

    def __len__(self) -> int:
        return len(self.targets)

    def read(self, index: int) -> Sample:
        """One sample; raises `Unreadable`."""
        shard, offset, size = map(int, self.where[index])
        name = self.describe(index)
        try:
            with open(self.shards[shard], "rb") as file:
                file.seek(offset)
                data = file.read(size)
        except OSError as error:
            raise Unreadable(name, f"{type(error).__name__}: {error}") from error
        return Sample(read_image(io.BytesIO(data), name), int(self.targets[index]))

    def describe(self, index: int) -> str:
        """The shard and the key of a sample in it."""
        return f"{self.shards[int(self.where[index][0])]}:{os.fsdecode(self.keys[index])}"


def open_shards(folder: Path, split: str, *, labelled: bool = True) -> ShardSource:
    """The samples of a split: of the shards that FOLDER/_info.json lists, in FOLDER/SPLIT, or of that word's name."""
    shards = _find_shards(folder, split)
    where, keys, targets = [], [], []
    for number, shard in enumerate(
        tqdm(shards, desc="indexing shards", unit="shard", disable=len(shards) < 100)
    ):
        for key, offset, size, target in _index(shard, labelled=labelled):
            where.append((number, offset, size))
            keys.append(os.fsencode(key))
            targets.append(target)
    if not targets:
        raise ValueError(f"no images in the {len(shards)} shards of {folder}")
    classes: tuple[str, ...] = ()
    if labelled:
        classes = read_class_list(folder) or numbered(max(targets))
        if max(targets) >= len(classes):
            raise ValueError(
                f"{folder} names {len(classes)} classes, but has a sample of class {max(targets)}"
            )
    name = f"{folder} ({split})"
    arrays = np.array(where, dtype=np.int64), np.array(keys), np.array(targets, dtype=np.int64)
    return ShardSource(name, tuple(map(str, shards)), *arrays, classes)


def _find_shards(folder: Path, split: str) -> list[Path]:
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}")
    names = SPLITS.get(split, ())
    for info in (folder / name for name in INFO):
        if info.is_file() and split != ALL:
            return _named_shards(info, names)
    expected = "*.tar"
    if split == ALL:
        found = sorted(folder.glob("**/*.tar"))
    else:
        found = next(filter(None, (_shards_called(folder, name) for name in names)), [])
        expected = (
            f"{', '.join(f'{name}/*.tar' for name in names)}, or one of these words in the names of files"
        )
    if not found:
        raise FileNotFoundError(f"{folder} has no shards of the {split} split: expected {expected}")
    return found


def _shards_called(folder: Path, name: str) -> list[Path]:
    """The shards in FOLDER/NAME, or those in FOLDER that have this word in their name, in any case of letters."""
    if inside := sorted(path for path in folder.glob("*/*.tar") if path.parent.name.lower() == name):
        return inside
    found = []
    for path in sorted(folder.glob("*.tar")):
        # Whole words: "strain" is no training split, and "larval" no validation split.
        words = set(re.findall(r"[^\W\d_]+", path.stem.lower()))
        if name in words:
            found.append(path)
            if len(splits := {split for word, split in OWN_SPLIT.items() if word in words}) > 1:
                raise ValueError(
                    f"{path} is named after the splits {', '.join(sorted(splits))}; expected one. Rename it, or "
                    f"move the shards of a split into a folder of its name"
                )
    return found


def _named_shards(info: Path, names: tuple[str, ...]) -> list[Path]:
    """The shards that the description of a data set lists for a split, none of them outside its folder."""
    try:
        splits: dict[str, Any] = json.loads(info.read_text(encoding="utf-8-sig"))["splits"]
        split = next((splits[name] for name in names if name in splits), None)
        if split is not None:
            return [info.parent / Path(str(name)).name for name in split["filenames"]]
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ValueError(f"{info} does not list shards by their splits: {error}") from error
    raise FileNotFoundError(f"{info} lists no shards of any of the splits {', '.join(names)}")


def _index(shard: Path, *, labelled: bool) -> Iterator[tuple[str, int, int, int]]:
    """Key, offset, size and class of each image of a shard."""
    images: dict[str, tuple[int, int]] = {}
    labels: dict[str, int] = {}
    dotted: dict[str, str] = {}
    try:
        with tarfile.open(shard, "r:") as tar:
            for member in tar:
                folder, _, file = member.name.rpartition("/")
                stem, _, suffix = file.partition(".")
                key, suffix = f"{folder}/{stem}" if folder else stem, f".{suffix.lower()}"
                if member.isdir() or not stem:
                    continue
                if suffix in (*image_suffixes(), LABEL) and not member.isfile():
                    raise ValueError(
                        f"{shard}:{member.name} is a link or a device, expected a file; pack what links stand for, "
                        "with GNU's tar --dereference --hard-dereference"
                    )
                if suffix in image_suffixes():
                    if key in images:
                        raise ValueError(
                            f"{shard}:{member.name} is a second image of the sample {key}, expected one; give it "
                            f"another name, or {key}.mask{suffix} if it belongs to the first"
                        )
                    images[key] = member.offset_data, member.size
                elif suffix == LABEL and labelled:
                    content = tar.extractfile(member)
                    labels[key] = _label(
                        b"" if content is None else content.read(32), f"{shard}:{member.name}"
                    )
                elif os.path.splitext(suffix)[1] in (*image_suffixes(), LABEL):
                    dotted[member.name] = key
            _require_end(tar)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ValueError(f"{shard} is not a whole, uncompressed tar file: {error}") from error
    # Beside an image, 17.seg.png is something else that belongs to it; alone, it is an image that would be lost.
    if lost := [name for name, key in dotted.items() if key not in images]:
        folder, slash, file = lost[0].rpartition("/")
        stem, suffix = os.path.splitext(file)
        raise ValueError(
            f"{shard} has dots in the names of {len(lost)} files, {lost[0]} for example, and in the WebDataset "
            f"format a name ends at its first dot; rename them, that one to "
            f"{folder}{slash}{stem.replace('.', '_')}{suffix}"
        )
    for key, (offset, size) in images.items():
        if labelled and key not in labels:
            raise ValueError(f"{shard}:{key} has no class, expected a file {key}{LABEL} with its number")
        yield key, offset, size, labels.get(key, UNLABELLED)


def _require_end(tar: tarfile.TarFile) -> None:
    """Refuse a file that goes on where tarfile stops: at a damaged header, or after the first of two shards."""
    assert tar.fileobj is not None
    tar.fileobj.seek(tar.offset)
    while block := tar.fileobj.read(2**20):
        if block.strip(b"\0"):
            raise tarfile.ReadError(f"what follows byte {tar.offset} has no header")


def _label(text: bytes, name: str) -> int:
    if not text.strip().isdigit() or len(text.strip()) > MOST_DIGITS:
        raise ValueError(
            f"{name} must hold the number of a class, of at most {MOST_DIGITS} digits, got {text[:80]!r}"
        )
    return int(text)
