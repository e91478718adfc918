"""What a source of samples is."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from PIL import Image

UNLABELLED = -1
# Of a class's number: all classes below it have a name.
MOST_DIGITS = 6
# What each split is called in folders and data sets, best first. "all" is everything, whatever it is called.
SPLITS = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "test"),
    "test": ("test", "testing"),
}
ALL = "all"


def numbered(most: int) -> tuple[str, ...]:
    """The names of classes that have numbers only."""
    return tuple(map(str, range(most + 1)))


class Sample(NamedTuple):
    """An RGB image and the number of its class, −1 where it has none."""

    image: Image.Image
    target: int


class Source(Protocol):
    """Samples by number. Every worker gets a copy: pickling one must be cheap.

    A source whose samples are not files of their own may have `files`, the paths of those that it reads, or a
    `fingerprint`: when they change, features are computed again. One that has images several times says in `distinct`
    how many there are.
    """

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes; none where samples are unlabelled."""
        ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> Sample:
        """One sample; raises `Unreadable` if its image cannot be used."""
        ...

    def describe(self, index: int) -> str:
        """The path or name of a sample, for messages."""
        ...
