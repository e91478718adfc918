"""What was measured, read from JSON: benchmarks, and training runs of the studies.

The files are not trusted: whatever is used of them is checked here, once, and a mistake is told with its file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from quickvit.bench import Row
from quickvit.report.sample import Sample

UPRIGHT, QUARTER, SLANTED = "upright", "random quarter turn", "45°"
TEXTS = ("case", "name", "dtype", "failure")
LARGEST = 1e300


@dataclass(frozen=True)
class Source:
    """Where numbers come from; `gpu` says whether the hardware is one."""

    file: str
    hardware: str
    gpu: bool
    date: str
    command: str
    commit: str


@dataclass(frozen=True)
class Measurement:
    """A record of `quickvit bench`."""

    benchmark: str
    batch: str
    compile: str
    rows: tuple[Row, ...]
    source: Source


@dataclass(frozen=True)
class Run:
    """One training of a study. Everything after the seed is None or empty where the file does not say it.

    scores: per cent, by pose and by name. answers: per cent, by classifier and metric. curve: updates, and the
    evaluations after them in per cent.
    """

    study: str
    dataset: str
    name: str
    seed: int
    model: str
    gmacs: float | None
    parameters: float | None
    images_per_s: float | None
    memory_mib: float | None
    curve: tuple[tuple[float, Mapping[str, float]], ...]
    scores: Mapping[str, Mapping[str, float]]
    answers: Mapping[str, Mapping[str, float]]
    source: Source

    @property
    def size(self) -> str:
        """The size in the name of its model, as in baseline_small_patch16_224; empty if there is none."""
        found = re.search(r"_([a-z0-9]+)_patch\d+", self.model)
        return found[1] if found else ""

    def score(self, name: str, pose: str = UPRIGHT) -> float | None:
        """A score in a pose."""
        return self.scores.get(pose, {}).get(name)

    def change(self, name: str, pose: str) -> float | None:
        """How much higher a score is in a pose than upright."""
        there, upright = self.score(name, pose), self.score(name)
        return None if there is None or upright is None else there - upright


Metric = Callable[[Run], float | None]


@dataclass(frozen=True)
class Results:
    """Everything that was measured."""

    measurements: tuple[Measurement, ...] = ()
    runs: tuple[Run, ...] = ()

    def measured(self, *benchmarks: str) -> Iterator[tuple[Measurement, Row]]:
        """The rows of some benchmarks."""
        for measurement in self.measurements:
            if measurement.benchmark in benchmarks:
                for row in measurement.rows:
                    yield measurement, row

    def study(self, study: str, dataset: str | None = None, name: str | None = None) -> tuple[Run, ...]:
        """The runs of a study, of a data set and of a name if given."""
        return tuple(
            run
            for run in self.runs
            if run.study == study and dataset in (None, run.dataset) and name in (None, run.name)
        )

    def datasets(self, study: str) -> list[str]:
        """The data sets of a study."""
        return sorted({run.dataset for run in self.study(study)})

    def sample(self, study: str, dataset: str, name: str, metric: Metric) -> Sample | None:
        """A number over the seeds."""
        return Sample.of(map(metric, self.study(study, dataset, name)))


def read_results(bench: str | Path, runs: str | Path | None = None) -> Results:
    """The records in `bench` and the runs in the folders of `runs`, by default `bench`/results if it is there."""
    bench = _folder(Path(bench), "benchmarks")
    runs = bench / "results" if runs is None else _folder(Path(runs), "results")
    measurements = tuple(_measurement(_open(file, bench)) for file in sorted(bench.glob("*.json")))
    trained: dict[tuple[str, str, str, int], Run] = {}
    for file in sorted(runs.glob("*/*.json")):
        run = _run(_open(file, runs))
        key = run.study, run.dataset, run.name, run.seed
        if key in trained:
            raise ValueError(
                f"{file}: seed {run.seed} of {run.name!r} in the study {run.study!r} on {run.dataset!r} is also "
                f"in {trained[key].source.file}; remove one of them"
            )
        trained[key] = run
    return Results(measurements, tuple(trained.values()))


def _folder(path: Path, kind: str) -> Path:
    if not path.is_dir():
        raise ValueError(f"there is no folder {path}; expected one with the JSON files of {kind}")
    return path


# ---------------------------------------------------------------------- records


def _measurement(record: Entry) -> Measurement:
    settings = record.entry("settings")
    return Measurement(
        record.text("benchmark"),
        settings.word("batch"),
        settings.word("compile"),
        tuple(_row(entry) for entry in record.entries("results", required=True)),
        _source(record),
    )


def _row(entry: Entry) -> Row:
    values: dict[str, Any] = {
        field.name: entry.text(field.name, None) if field.name in TEXTS else entry.number(field.name)
        for field in fields(Row)
    }
    return Row(**{**values, "case": entry.text("case"), "name": entry.text("name")})


def _run(record: Entry) -> Run:
    training = record.entry("training")
    return Run(
        study=record.text("study"),
        dataset=record.text("dataset"),
        name=record.text("name"),
        seed=record.integer("seed"),
        model=record.entry("model").text("name", ""),
        gmacs=record.number("gmacs"),
        parameters=record.number("parameters"),
        images_per_s=training.number("images_per_s"),
        memory_mib=training.number("memory_mib"),
        curve=tuple(_evaluation(entry) for entry in record.entries("curve")),
        scores={entry.text("pose"): _scores(entry) for entry in record.entries("poses")},
        answers={
            name: {
                metric: 100 * value for metric, value in record.entry("answers").entry(name).numbers().items()
            }
            for name in record.entry("answers").values
        },
        source=_source(record.entry("provenance")),
    )


def _evaluation(entry: Entry) -> tuple[float, dict[str, float]]:
    """A line of a journal: shares become per cent."""
    step = entry.number("step")
    found = {key: 100 * value for key, value in entry.numbers("eval/").items()}
    return (0.0 if step is None else step), found


def _scores(entry: Entry) -> dict[str, float]:
    """What `quickvit eval rotation --json` says of a pose: a classifier in per cent, frozen features in shares."""
    scores = {key: value for key in ("top1", "top5") if (value := entry.number(key)) is not None}
    return scores | {key: 100 * value for key, value in entry.entry("scores").numbers().items()}


def _source(record: Entry) -> Source:
    facts = record.entry("hardware")
    threads, gpu = facts.number("threads"), facts.text("gpu", "")
    cpu = facts.text("cpu", "unknown hardware") + (f", {threads:.0f} threads" if threads else "")
    date, command, commit = (record.text(key, "") for key in ("date", "command", "commit"))
    return Source(record.name, gpu or cpu, bool(gpu), date[:10], command, commit)


# ---------------------------------------------------------------------- JSON


@dataclass(frozen=True)
class Entry:
    """An object in a JSON file; what is asked of it has the right type or is refused.

    name: of the file, from the folder that was read on, so that a report does not depend on where that lies.
    place: of the object in the file.
    """

    file: Path
    name: str
    place: str
    values: Mapping[str, Any]

    def wrong(self, key: str, expected: str) -> ValueError:
        """What to say of a value that is not what it should be."""
        place = f"{self.place}{key}"
        if key not in self.values:
            return ValueError(f"{self.file}: {place} is missing; expected {expected}")
        return ValueError(f"{self.file}: {place} is {str(self.values[key])[:80]!r}; expected {expected}")

    def text(self, key: str, *default: Any) -> Any:
        """A string; where there is none the default, if one is given."""
        value = self.values.get(key)
        if value is None and default:
            return default[0]
        if not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value

    def word(self, key: str) -> str:
        """A string or a number as a string, empty where there is none."""
        value = self.values.get(key)
        return value if isinstance(value, str) else "" if value is None else f"{self.number(key):g}"

    def number(self, key: str) -> float | None:
        """A finite number, None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST:
            raise self.wrong(key, "a finite number")
        return value

    def integer(self, key: str) -> int:
        """An integer, which must be there."""
        value = self.values.get(key)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(key, "an integer")
        return value

    def numbers(self, prefix: str = "") -> dict[str, float]:
        """All numbers whose names begin so."""
        found = {key: self.number(key) for key in self.values if key.startswith(prefix)}
        return {key: value for key, value in found.items() if value is not None}

    def entry(self, key: str) -> Entry:
        """An object in this one, empty where there is none."""
        value = self.values.get(key)
        if not isinstance(value, (dict, type(None))):
            raise self.wrong(key, "an object")
        return replace(self, place=f"{self.place}{key}.", values=value or {})

    def entries(self, key: str, *, required: bool = False) -> list[Entry]:
        """A list of objects, empty where there is none unless it is required."""
        value = self.values.get(key)
        if value is None and not required:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self.wrong(key, "a list of objects")
        return [replace(self, place=f"{self.place}{key}[{i}].", values=item) for i, item in enumerate(value)]


def _open(file: Path, folder: Path) -> Entry:
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON that can be read: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected an object with what was measured, got {type(values).__name__}")
    name = folder.resolve().name / file.relative_to(folder)
    return Entry(file, name.as_posix(), "", values)
