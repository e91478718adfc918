"""What was measured here beside what the paper says, row by row."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from math import floor, log10
from typing import Any, Generic

from quickvit.bench import Row
from quickvit.report.paper import Key, Numbers, Quoted
from quickvit.report.results import Measurement, Source
from quickvit.report.sample import number
from quickvit.report.table import NOT_RUN, NOTHING, unique

FAILED = "failed"
SIGNIFICANT = 3


@dataclass(frozen=True)
class Line(Generic[Key]):
    """A row of the paper, a measurement of ours, or both."""

    key: Key
    quoted: Numbers
    measurement: Measurement | None = None
    row: Row | None = None

    @property
    def place(self) -> str:
        """Hardware, dtype and what else makes times differ."""
        if self.measurement is None or self.row is None:
            return NOTHING
        batch = self.measurement.batch and f"batch {self.measurement.batch}"
        compiled = {"": "", "none": "eager"}.get(
            self.measurement.compile, f"compiled {self.measurement.compile}"
        )
        parts = (self.measurement.source.hardware, self.row.dtype, batch, compiled)
        return ", ".join(part for part in parts if part)

    def here(self, name: str, digits: int | None = None, scale: float = 1.0) -> str:
        """Our number of this name."""
        if self.row is None:
            return NOT_RUN
        if self.row.failure is not None:
            return FAILED
        value = getattr(self.row, name)
        return NOT_RUN if value is None else written(scale * value, digits)

    def paper(self, name: str, digits: int | None = None) -> str:
        """The paper's number of this name, with so many decimals or as the paper has it."""
        if name not in self.quoted:
            return NOTHING
        return f"{self.quoted[name]:,g}" if digits is None else written(self.quoted[name], digits)


def lines(measured: Iterable[tuple[Key, Measurement, Row]], quoted: Quoted[Key]) -> list[Line[Key]]:
    """The paper's rows in their order, each as often as it was measured here, then what it does not have."""
    found: dict[Key, list[tuple[Measurement | None, Row | None]]] = defaultdict(list)
    for key, measurement, row in measured:
        found[key].append((measurement, row))
    return [
        Line(key, quoted.rows.get(key, {}), measurement, row)
        for key in dict.fromkeys([*quoted.rows, *found])
        for measurement, row in found.get(key) or [(None, None)]
    ]


def sources(found: Iterable[Line[Key]]) -> tuple[Source, ...]:
    """Where the measurements come from."""
    return unique(line.measurement.source for line in found if line.measurement is not None)


def written(value: float, digits: int | None = None) -> str:
    """A number of ours with so many decimals, or with three significant digits."""
    if digits is None:
        digits = max(0, SIGNIFICANT - 1 - floor(log10(abs(value)))) if value else 0
    return number(value, digits)


def times(ratio: float | str, digits: int = 2) -> str:
    """A ratio, as in 1.94×; words stay words."""
    if isinstance(ratio, float | int):
        return f"{number(ratio, digits)}×"
    return f"{ratio}×" if ratio[:1].isdigit() else ratio


def quotation(*quoted: Quoted[Any]) -> str:
    """Labels and settings, for the line below a table."""
    return "; ".join(dict.fromkeys(f"{q.label} ({q.setting})" for q in quoted))


def family_name(family: str) -> str:
    """As it is written in tables."""
    return "ViT" if family == "vit" else family
