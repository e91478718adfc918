"""What is taken of the runs of a study, and how it is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quickvit.report.paper import Numbers
from quickvit.report.results import QUARTER, SLANTED, Metric, Run
from quickvit.report.sample import Sample, number
from quickvit.report.table import HERE, NOT_RUN, NOTHING, PAPER, Column


@dataclass(frozen=True)
class Measure:
    """A column of a study: what to take of each run, and how to write it; what is counted has no spread."""

    title: str
    metric: Metric
    digits: int = 1
    sign: bool = False
    scale: float = 1.0
    counted: bool = False

    def cell(self, runs: Iterable[Run]) -> str:
        """Mean and spread over the seeds."""
        sample = Sample.of(None if (v := self.metric(run)) is None else self.scale * v for run in runs)
        if sample is None:
            return NOT_RUN
        return number(sample.mean, self.digits) if self.counted else sample.text(self.digits, self.sign)


@dataclass(frozen=True)
class Quote:
    """A column of the paper beside those of a study: the name of its number, and how to write it."""

    title: str
    key: str
    digits: int = 1
    sign: bool = False

    def cell(self, numbers: Numbers) -> str:
        """The paper's number."""
        return number(numbers[self.key], self.digits, self.sign) if self.key in numbers else NOTHING


Shown = Measure | Quote


def headings(shown: Iterable[Shown]) -> tuple[Column, ...]:
    """The headings of these columns."""
    return tuple(Column(c.title, PAPER if isinstance(c, Quote) else HERE) for c in shown)


def row(shown: Iterable[Shown], runs: Sequence[Run], numbers: Numbers) -> tuple[str, ...]:
    """The cells of these columns, from runs of ours and numbers of the paper."""
    return tuple(c.cell(numbers) if isinstance(c, Quote) else c.cell(runs) for c in shown)


def top1(run: Run) -> float | None:
    """Accuracy on upright images."""
    return run.score("top1")


def turned(run: Run) -> float | None:
    """Change of the accuracy on images turned by random multiples of 90°."""
    return run.change("top1", QUARTER)


def tilted(run: Run) -> float | None:
    """Change of the accuracy on images turned by 45°."""
    return run.change("top1", SLANTED)


GMACS = Measure("GMACs", lambda run: run.gmacs, 3, counted=True)
PARAMETERS = Measure("parameters (M)", lambda run: run.parameters, 2, scale=1e-6, counted=True)
RATE = Measure("images/s in training", lambda run: run.images_per_s, 0)
MEMORY = Measure("MiB in training", lambda run: run.memory_mib, 0)
TOP1 = Measure("top-1 (%)", top1, 2)
TOP5 = Measure("top-5 (%)", lambda run: run.score("top5"), 2)
TURNED = Measure("turned by 90°s", turned, 2, sign=True)
TILTED = Measure("turned by 45°", tilted, 2, sign=True)
PAPER_TOP1, PAPER_TOP5 = Quote(TOP1.title, "top1"), Quote(TOP5.title, "top5")
PAPER_TURNED = Quote(TURNED.title, "rotated", sign=True)
