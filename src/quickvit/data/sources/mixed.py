"""Several sources as one, each with its share of the samples."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate

from quickvit.data.sources.base import UNLABELLED, Sample, Source


@dataclass(frozen=True, eq=False)
class MixedSource:
    """Samples of several sources, unlabelled; `ends` are the places at which the part of each ends.

    Every sample is there at least once, and those of a source with a large weight several times.
    """

    name: str
    sources: tuple[Source, ...]
    ends: tuple[int, ...]
    classes: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Those of all sources."""
        return tuple(file for source in self.sources for file in getattr(source, "files", ()))

    @property
    def fingerprint(self) -> str:
        """Those of all sources."""
        return " ".join(getattr(source, "fingerprint", "") for source in self.sources).strip()

    @property
    def distinct(self) -> int:
        """How many images there are, each counted once."""
        return sum(len(source) for source in self.sources)

    def __len__(self) -> int:
        return self.ends[-1]

    def read(self, index: int) -> Sample:
        """One sample; raises `Unreadable`."""
        source, inside = self._find(index)
        return Sample(source.read(inside).image, UNLABELLED)

    def describe(self, index: int) -> str:
        """What its source calls a sample."""
        source, inside = self._find(index)
        return source.describe(inside)

    def _find(self, index: int) -> tuple[Source, int]:
        number = bisect_right(self.ends, index)
        source = self.sources[number]
        return source, (index - (self.ends[number - 1] if number else 0)) % len(source)


def mix(sources: Mapping[Source, float]) -> MixedSource:
    """A source in which the others have shares in proportion to their weights, whatever their sizes."""
    if not sources:
        raise ValueError("there is nothing to mix; give at least one source with its weight")
    for source, weight in sources.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"the weight of {source.name} must be a number above 0, got {weight}")
    # As many as it takes for the source that is the scarcest for its weight to be there once.
    scale = max(len(source) / weight for source, weight in sources.items())
    ends = accumulate(round(scale * weight) for weight in sources.values())
    return MixedSource(" and ".join(source.name for source in sources), tuple(sources), tuple(ends))
