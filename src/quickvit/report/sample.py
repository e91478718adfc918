"""The same number from several seeds: mean, spread, and whether two of them differ."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev


@dataclass(frozen=True)
class Sample:
    """One number per seed."""

    values: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.values:
            raise ValueError("a sample needs at least one value")

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Sample | None:
        """The sample of the values that are there, None if none is."""
        there = tuple(value for value in values if value is not None)
        return cls(there) if there else None

    @property
    def mean(self) -> float:
        """Mean over the seeds."""
        return fmean(self.values)

    @property
    def spread(self) -> float | None:
        """Standard deviation over the seeds; one seed has none."""
        return stdev(self.values) if len(self.values) > 1 else None

    def text(self, digits: int = 1, sign: bool = False) -> str:
        """As in 93.1 ± 0.2, or 93.1 from one seed."""
        words = number(self.mean, digits, sign)
        return words if self.spread is None else f"{words} ± {number(self.spread, digits)}"


def number(value: float, digits: int, sign: bool = False) -> str:
    """A number with so many decimals and a proper minus; nothing is minus zero."""
    value = round(value, digits) + 0.0
    return f"{value:{'+' if sign and value else ''},.{digits}f}".replace("-", "−")


def uncertainty(a: Sample, b: Sample) -> float | None:
    """Twice the standard error of the difference of two means; None if one has a single seed."""
    if a.spread is None or b.spread is None:
        return None
    return 2 * sqrt(a.spread**2 / len(a.values) + b.spread**2 / len(b.values))
