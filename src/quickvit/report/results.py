"""What was measured, read from JSON: benchmarks, training runs of the studies, evaluations, an exploration.

The files are not trusted: whatever is used of them is checked here, once, and a mistake is told with its file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from quickvit.bench import Row
from quickvit.report.entry import Entry, Source, open_entry, read_source
from quickvit.report.exploration import Exploration
from quickvit.report.exploration_file import read_exploration
from quickvit.report.sample import Sample

UPRIGHT, QUARTER, SLANTED = "upright", "random quarter turn", "45°"
TEXTS = ("case", "name", "dtype", "failure")
# The data sets of `quickvit eval all`, and what its two classifiers are scored by.
PLACES = {
    "imagenet": "accuracy",
    "inaturalist": "accuracy",
    "places365": "accuracy",
    "ade20k": "mean_iou",
    "voc2012": "mean_iou",
}
METRICS = ("accuracy", "weighted_f1", "balanced_accuracy", "mean_iou", "pixel_accuracy")
# Per cent, by classifier and metric.
Answers = Mapping[str, Mapping[str, float]]


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

    scores: per cent, by pose and by name. curve: updates, and the evaluations after them in per cent. progress:
    updates, and what frozen features were good for after them: per cent by pose, classifier and metric.
    """

    study: str
    dataset: str
    name: str
    seed: int
    model: str
    options: tuple[str, ...]
    gmacs: float | None
    parameters: float | None
    images_per_s: float | None
    memory_mib: float | None
    curve: tuple[tuple[float, Mapping[str, float]], ...]
    scores: Mapping[str, Mapping[str, float]]
    progress: tuple[tuple[int, Mapping[str, Answers]], ...]
    source: Source

    @property
    def size(self) -> str:
        """The size in the name of its model, as in baseline_small_patch16_224; empty if there is none."""
        found = re.search(r"_([a-z0-9]+)_patch\d+", self.model)
        return found[1] if found else ""

    def answers(self, pose: str = UPRIGHT, step: int | None = None) -> Answers:
        """What frozen features are good for in a pose, after so many updates or at the end."""
        found = [poses for s, poses in self.progress if step in (None, s)]
        return found[-1].get(pose, {}) if found else {}

    def score(self, name: str, pose: str = UPRIGHT) -> float | None:
        """A score in a pose."""
        return self.scores.get(pose, {}).get(name)

    def change(self, name: str, pose: str) -> float | None:
        """How much higher a score is in a pose than upright."""
        there, upright = self.score(name, pose), self.score(name)
        return None if there is None or upright is None else there - upright


@dataclass(frozen=True)
class Evaluation:
    """What `quickvit eval … --json` said of a frozen model.

    label: of the model, from the name of the file, DATA-LABEL-PROTOCOL.json. answers: per cent, by classifier and
    metric. scores: per cent, by pose and classifier.
    """

    label: str
    dataset: str
    protocol: str
    answers: Answers
    scores: Mapping[str, Mapping[str, float]]
    source: Source


Metric = Callable[[Run], float | None]


@dataclass(frozen=True)
class Results:
    """Everything that was measured."""

    measurements: tuple[Measurement, ...] = ()
    runs: tuple[Run, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    exploration: Exploration | None = None

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


def read_results(
    bench: str | Path, runs: str | Path | None = None, explored: str | Path | None = None
) -> Results:
    """The records in `bench`, the runs in the folders of `runs`, and the exploration in the file `explored`.

    Runs are in `bench`/results by default, and the exploration is the file in `bench`/explorer, where they are there.
    Evaluations are in `bench`/frozen.
    """
    bench = _folder(Path(bench), "benchmarks")
    runs = bench / "results" if runs is None else _folder(Path(runs), "results")
    measurements = tuple(_measurement(open_entry(file, bench)) for file in sorted(bench.glob("*.json")))
    trained: dict[tuple[str, str, str, int], Run] = {}
    for file in sorted(runs.glob("*/*.json")):
        run = _run(open_entry(file, runs))
        key = run.study, run.dataset, run.name, run.seed
        if key in trained:
            raise ValueError(
                f"{file}: seed {run.seed} of {run.name!r} in the study {run.study!r} on {run.dataset!r} is also "
                f"in {trained[key].source.file}; remove one of them"
            )
        trained[key] = run
    evaluations = tuple(
        evaluation
        for file in sorted((bench / "frozen").glob("*.json"))
        for evaluation in _evaluations(open_entry(file, bench))
    )
    return Results(measurements, tuple(trained.values()), evaluations, _exploration(bench, explored))


def _exploration(bench: Path, chosen: str | Path | None) -> Exploration | None:
    files = [Path(chosen)] if chosen is not None else sorted((bench / "explorer").glob("*.json"))
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ValueError(
            f"there are several explorations in {bench / 'explorer'}, {names}; choose one with --explorer"
        )
    return read_exploration(files[0]) if files else None


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
        read_source(record),
    )


def _row(entry: Entry) -> Row:
    values: dict[str, Any] = {
        field.name: entry.text(field.name, None) if field.name in TEXTS else entry.number(field.name)
        for field in fields(Row)
    }
    return Row(**{**values, "case": entry.text("case"), "name": entry.text("name")})


def _run(record: Entry) -> Run:
    training, model = record.entry("training"), record.entry("model")
    return Run(
        study=record.text("study"),
        dataset=record.text("dataset"),
        name=record.text("name"),
        seed=record.integer("seed"),
        model=model.text("name", ""),
        options=model.texts("options") if "options" in model.values else (),
        gmacs=record.number("gmacs"),
        parameters=record.number("parameters"),
        images_per_s=training.number("images_per_s"),
        memory_mib=training.number("memory_mib"),
        curve=tuple(_evaluation(entry) for entry in record.entries("curve")),
        scores={entry.text("pose"): _scores(entry) for entry in record.entries("poses")},
        progress=tuple(_progress(entry) for entry in record.entries("progress")),
        source=read_source(record.entry("provenance")),
    )


def _evaluations(record: Entry) -> list[Evaluation]:
    """What a file holds: of `quickvit eval all` one for each data set, of other commands one."""
    source, training = read_source(record), record.text("trained_by", None)
    if training is not None:
        source = replace(source, command=f"{training} && {source.command}")
    label = "-".join(record.file.stem.split("-")[1:-1]) or record.file.stem
    protocol = record.text("protocol")
    if protocol == "all":
        places = {
            place: {
                name: {metric: 100 * share}
                for name in ("linear", "knn")
                if (share := record.number(f"{place} {name}")) is not None
            }
            for place, metric in PLACES.items()
        }
        return [
            Evaluation(label, place, protocol, found, {}, source) for place, found in places.items() if found
        ]
    answers = _answers(record.entry("answers"))
    scores = {entry.text("pose"): _scores(entry) for entry in record.entries("rows")}
    return [Evaluation(label, Path(record.text("data")).name, protocol, answers, scores, source)]


def _answers(entry: Entry) -> dict[str, dict[str, float]]:
    """Shares, by classifier and metric, as per cent."""
    return {
        name: {
            metric: 100 * value
            for metric in METRICS
            if (value := entry.entry(name).number(metric)) is not None
        }
        for name in entry.values
    }


def _progress(entry: Entry) -> tuple[int, dict[str, Answers]]:
    """What was found of the teacher after so many updates."""
    poses: dict[str, Answers] = {
        pose.text("pose"): _answers(pose.entry("answers")) for pose in entry.entries("poses")
    }
    return entry.integer("step"), poses


def _evaluation(entry: Entry) -> tuple[float, dict[str, float]]:
    """A line of a journal: shares become per cent."""
    step = entry.number("step")
    found = {key: 100 * value for key, value in entry.numbers("eval/").items()}
    return (0.0 if step is None else step), found


def _scores(entry: Entry) -> dict[str, float]:
    """What `quickvit eval rotation --json` says of a pose: a classifier in per cent, frozen features in shares."""
    scores = {key: value for key in ("top1", "top5") if (value := entry.number(key)) is not None}
    return scores | {key: 100 * value for key, value in entry.entry("scores").numbers().items()}
