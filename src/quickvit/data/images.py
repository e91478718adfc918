"""Image files: finding them, and reading whatever they hold as RGB."""

from __future__ import annotations

import os
import struct
import warnings
import zlib
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import BinaryIO

import numpy as np
from PIL import Image

UNREADABLE = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    RuntimeError,
    AttributeError,
    LookupError,
    TypeError,
    OverflowError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
    Image.DecompressionBombWarning,
)
"""What Pillow's decoders were seen to raise on files that are damaged, foreign or too large."""
SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N", "I")
# EPS files are programs, which Pillow has Ghostscript run, and in a file of IPTC it opens whatever is in there. The
# others it recognises and leaves to further software.
NO_IMAGES = ("EPS", "IPTC", "BUFR", "GRIB", "HDF5", "MPEG", "WMF")


class Unreadable(Exception):
    """An image that cannot be used: where it is, and why."""

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(path, reason)
        self.path, self.reason = path, reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


# ---------------------------------------------------------------------- reading


@contextmanager
def decoding(name: str) -> Iterator[None]:
    """Turn whatever a decoder raises into `Unreadable`, and its warning of a decompression bomb too."""
    try:
        with warnings.catch_warnings():
            # Odd metadata do not matter here.
            warnings.simplefilter("ignore")
            # Pillow only warns up to twice its limit; the limit is meant.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            yield
    except UNREADABLE as error:
        raise Unreadable(name, " ".join(f"{type(error).__name__}: {error}".split())) from error


def read_image(file: str | Path | BinaryIO, name: str | None = None) -> Image.Image:
    """The image in a file as RGB; raises `Unreadable` with the file's name if that cannot be done."""
    with decoding(str(file) if name is None else name), open_image(file) as image:
        return to_rgb(image)


def open_image(file: str | Path | BinaryIO) -> Image.Image:
    """Pillow's image of a file in one of the formats that are safe, as it is stored; to be used in `decoding`."""
    return Image.open(file, formats=_formats())


@cache
def _formats() -> tuple[str, ...]:
    """What Pillow reads by itself."""
    Image.init()
    return tuple(name for name in Image.ID if name not in NO_IMAGES)


def to_rgb(image: Image.Image) -> Image.Image:
    """An image of any mode as 8-bit RGB: 16 bits are scaled down, transparency is laid on white.

    EXIF orientation is not applied, as in the literature's evaluations; only that of TIFF files is, by Pillow as it
    opens them. An image of floats is a ValueError, since nothing says which of them is white.
    """
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image
    if image.mode in SIXTEEN_BITS:
        values = np.asarray(image)
        if values.size and not 0 <= values.min() <= values.max() < 2**16:
            raise ValueError(
                f"mode {image.mode} with values from {values.min()} to {values.max()}, not 16 bits"
            )
        return Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("mode F has no fixed range; save the image with 8 or 16 bits")
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.new("RGBA", layer.size, "white")
        image.alpha_composite(layer)
    return image.convert("RGB")


# ---------------------------------------------------------------------- finding


def find_images(sources: Iterable[str | Path]) -> list[Path]:
    """The files among `sources` and all files with an image's suffix in its folders, each once.

    Named files are taken whatever their suffix; folders are searched recursively, in alphabetical order.
    """
    found: dict[Path, None] = {}
    for source in map(Path, sources):
        inside = (source / path for path in walk_images(source)) if source.is_dir() else (source,)
        found.update(dict.fromkeys(inside))
    return list(found)


def walk_images(folder: str | Path) -> list[str]:
    """The paths, relative to a folder, of all images below it, sorted part by part; hidden files are left out.

    Links are followed, and each real folder is entered once on a way down.
    """
    return sorted(_walk(os.fspath(folder), "", image_suffixes(), ()), key=lambda path: path.split(os.sep))


@cache
def image_suffixes() -> frozenset[str]:
    """The endings of image files, with their dots, in lower case."""
    return frozenset(suffix for suffix, name in Image.registered_extensions().items() if name in _formats())


def _walk(folder: str, prefix: str, suffixes: Container[str], above: tuple[str, ...]) -> Iterator[str]:
    real = os.path.realpath(folder)
    if real in above:
        return
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            if _is_folder(entry):
                yield from _walk(entry.path, f"{prefix}{entry.name}{os.sep}", suffixes, (*above, real))
            elif os.path.splitext(entry.name)[1].lower() in suffixes:
                yield prefix + entry.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # A link to itself, for example.
        return False
