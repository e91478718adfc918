"""Classification with frozen features: nearest neighbours, linear probes, logistic regression, blood cells.

A classifier is fitted to the features of upright training images and then labels others, in any pose. It may have
several answers, each with a name: one for every number of neighbours, for example.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from quickvit.data import Source, Unreadable, open_source
from quickvit.evaluate.extract import Features, image_vector
from quickvit.evaluate.knn import NEIGHBOURS, TEMPERATURE, Metric, knn_predict
from quickvit.evaluate.linear import LEARNING_RATES, Probe, Probes, ProbeTraining, probe_grid, train_probes
from quickvit.evaluate.logistic import LogisticRegression, fit_logistic
from quickvit.evaluate.selection import Trial, best, hold_out
from quickvit.train.distributed import World

# DINOv2's inverse strengths of regularisation.
CS = tuple(10 ** (-6 + 11 * i / 44) for i in range(45))
# DinoBloom's numbers of neighbours, and its rule for C: width × classes / 100.
BLOOD_NEIGHBOURS, BLOOD_SCALE = (1, 20), 100
MAX_ITERATIONS = 1000


class Splits(NamedTuple):
    """What is learned from, what hyper-parameters are chosen on (None: a part of the former), and the test."""

    train: Source
    val: Source | None
    test: Source


class Classifier(Protocol):
    """What was learned from frozen features."""

    @property
    def main(self) -> str:
        """The name of the answer that counts."""
        ...

    @property
    def chosen(self) -> dict[str, Any]:
        """The hyper-parameters that were chosen."""
        ...

    @property
    def tried(self) -> Sequence[Trial]:
        """What they were chosen from."""
        ...

    def predict(self, features: Features) -> dict[str, Tensor]:
        """The labels [n] of samples, on the CPU, by the name of the answer."""
        ...


def open_splits(spec: str | Path, test: str | None = None) -> Splits:
    """The splits of a data set; the test is the split of this name, or by default "test" or else "val"."""
    train = open_source(spec, "train")
    try:
        tested = open_source(spec, test or "test")
    except FileNotFoundError:
        if test is not None:
            raise
        return Splits(train, None, open_source(spec, "val"))
    if test == "val":
        return Splits(train, None, tested)
    # Where there is no validation split, the test split takes its name too.
    val = open_source(spec, "val")
    return Splits(train, None if _are_the_same(val, tested) else val, tested)


def _are_the_same(one: Source, other: Source) -> bool:
    """Whether two splits have equally many images, and the same first and last one."""
    if len(one) != len(other):
        return False
    try:
        pairs = [(one.read(i).image, other.read(i).image) for i in (0, len(one) - 1)]
    except Unreadable:
        return all(one.describe(i) == other.describe(i) for i in (0, len(one) - 1))
    return all(a.size == b.size and a.tobytes() == b.tobytes() for a, b in pairs)


def require_known_classes(train: Features, others: Sequence[Features]) -> None:
    """Refuse samples of no class, and of classes of which there is nothing to learn, by name."""
    for features in (train, *others):
        source, known = features.source, train.source.classes
        if not known or source.classes != known:
            raise ValueError(
                f"{source.name} has {len(source.classes)} classes, {train.source.name} has {len(known)}; "
                "expected the same ones, and some"
            )
        outside = (features.targets < 0) | (features.targets >= len(known))
        if outside.any():
            place = int(outside.nonzero()[0])
            raise ValueError(
                f"{source.describe(int(features.indices[place]))} has the class number "
                f"{int(features.targets[place])}; expected 0 … {len(known) - 1}"
            )
        unknown = ~torch.isin(features.targets, train.targets)
        if unknown.any():
            place = int(unknown.nonzero()[0])
            raise ValueError(
                f"{source.describe(int(features.indices[place]))} is of the class "
                f"{known[int(features.targets[place])]!r}, of which {train.source.name} has no readable image"
            )


# ---------------------------------------------------------------------- nearest neighbours


@dataclass(frozen=True)
class KnnClassifier:
    """The votes of the nearest training images, for several numbers of them; processes share the queries."""

    train: Features
    ks: tuple[int, ...]
    metric: Metric
    temperature: float | None
    device: torch.device
    world: World
    progress: bool
    main: str = ""
    chosen: dict[str, Any] = field(default_factory=dict)
    tried: tuple[Trial, ...] = ()

    def predict(self, features: Features) -> dict[str, Tensor]:
        """By the name "k-NN" for every k."""
        return self.compare(features.vector, torch.arange(len(self.train.targets)))

    def compare(self, queries: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """The labels that some of the training images give these vectors, for every k that they suffice for."""
        whole = len(rows) == len(self.train.targets)
        labels = knn_predict(
            queries[self.world.rank :: self.world.size],
            self.train.vector if whole else self.train.vector[rows],
            self.train.targets[rows],
            len(self.train.source.classes),
            [k for k in self.ks if k <= len(rows)],
            metric=self.metric,
            temperature=self.temperature,
            device=self.device,
            progress=self.progress and self.world.main,
        )
        shares = self.world.gather({k: found.cpu() for k, found in labels.items()})
        joined = {k: torch.empty(len(queries), dtype=torch.int64) for k in labels}
        for rank, share in enumerate(shares):
            for k, found in share.items():
                joined[k][rank :: self.world.size] = found
        return {_knn_name(k): found for k, found in joined.items()}


def fit_knn(
    train: Features,
    val: Features | None = None,
    *,
    ks: Sequence[int] = NEIGHBOURS,
    metric: Metric = "cosine",
    temperature: float | None = TEMPERATURE,
    device: str | torch.device = "cpu",
    world: World | None = None,
    progress: bool = False,
) -> KnnClassifier:
    """DINOv2's k-NN: votes weighted by temperature; the number of neighbours that counts is chosen by accuracy."""
    if not ks:
        raise ValueError("ks is empty; give at least one number of neighbours")
    if min(ks) < 1:
        raise ValueError(f"numbers of neighbours must be at least 1, got {min(ks)}")
    rows, held = hold_out(train.targets) if val is None else (torch.arange(len(train.targets)), None)
    ks = tuple(k for k in ks if k <= len(rows))
    if not ks:
        raise ValueError(f"{train.source.name} has fewer images to learn from ({len(rows)}) than neighbours")
    knn = KnnClassifier(train, ks, metric, temperature, torch.device(device), world or World(), progress)
    if val is None:
        found, targets = knn.compare(train.vector[held], rows), train.targets[held]
    else:
        found, targets = knn.predict(val), val.targets
    trials = tuple(Trial({"k": k}, _accuracy(found[_knn_name(k)], targets)) for k in ks)
    chosen = best(trials)
    return replace(knn, main=_knn_name(chosen["k"]), chosen=chosen, tried=trials)


def _knn_name(k: int) -> str:
    return f"{k}-NN"


# ---------------------------------------------------------------------- linear probes


@dataclass(frozen=True)
class ProbeClassifier:
    """The probe that was the best on what was held out, trained again on everything."""

    probes: Probes
    chosen: dict[str, Any]
    tried: tuple[Trial, ...]
    main: str = "linear"

    def predict(self, features: Features) -> dict[str, Tensor]:
        """Under the name "linear"."""
        return {self.main: self.probes.predict(features.arrays)[0].cpu()}


def fit_linear(
    train: Features,
    val: Features | None = None,
    *,
    training: ProbeTraining | None = None,
    learning_rates: Sequence[float] = LEARNING_RATES,
    device: str | torch.device = "cpu",
    world: World | None = None,
    progress: bool = False,
) -> ProbeClassifier:
    """DINOv2's linear probe: a grid trained at once, of which processes share the learning rates."""
    world, device, classes = world or World(), torch.device(device), len(train.source.classes)
    arrays = _near(train.arrays, device)
    rows, held, targets = _choose_on(train, val)
    mine = probe_grid(arrays, learning_rates[world.rank :: world.size])
    scores: dict[Probe, float] = {}
    options: dict[str, Any] = {"training": training, "device": device, "progress": progress and world.main}
    if mine:
        found = train_probes(arrays, train.targets, classes, mine, rows=rows, **options).predict(held)
        scores = {p: _accuracy(labels.cpu(), targets) for p, labels in zip(mine, found, strict=True)}
    for others in world.gather(scores):
        scores |= others
    trials = tuple(
        Trial({"inputs": p.inputs, "learning_rate": p.learning_rate}, scores[p])
        for p in probe_grid(arrays, learning_rates)
    )
    chosen = best(trials)
    probes = train_probes(arrays, train.targets, classes, [Probe(**chosen)], **options)
    return ProbeClassifier(probes, chosen, trials)


# ---------------------------------------------------------------------- logistic regression


@dataclass(frozen=True)
class LogisticClassifier:
    """Logistic regression of the vector that stands for an image."""

    fitted: LogisticRegression
    chosen: dict[str, Any]
    tried: tuple[Trial, ...] = ()
    main: str = "logistic"

    def predict(self, features: Features) -> dict[str, Tensor]:
        """Under the name "logistic"."""
        return {self.main: self.fitted.predict(features.vector).cpu()}


def fit_logistic_grid(
    train: Features,
    val: Features | None = None,
    *,
    cs: Sequence[float] = CS,
    max_iterations: int = MAX_ITERATIONS,
    device: str | torch.device = "cpu",
    world: World | None = None,
    progress: bool = False,
) -> LogisticClassifier:
    """DINOv2's logistic regression: C chosen by accuracy, of which processes share the trials."""
    world = world or World()
    vectors = train.vector.to(device)
    rows, held, targets = _choose_on(train, val)
    learned, labels = (vectors, train.targets) if rows is None else (vectors[rows], train.targets[rows])
    scores = {}
    mine = cs[world.rank :: world.size]
    for c in tqdm(mine, "logistic regression", unit="fit", disable=not (progress and world.main)):
        fitted = fit_logistic(learned, labels, c, max_iterations=max_iterations)
        scores[c] = _accuracy(fitted.predict(image_vector(held)).cpu(), targets)
    for others in world.gather(scores):
        scores |= others
    trials = tuple(Trial({"c": c}, scores[c]) for c in cs)
    chosen = best(trials)
    fitted = fit_logistic(vectors, train.targets, chosen["c"], max_iterations=max_iterations)
    return LogisticClassifier(fitted, chosen, trials)


# ---------------------------------------------------------------------- blood cells


@dataclass(frozen=True)
class BloodClassifier:
    """DinoBloom's three classifiers; nothing about them is chosen."""

    knn: KnnClassifier
    linear: LogisticClassifier
    main: str = "logistic"
    tried: tuple[Trial, ...] = ()

    @property
    def chosen(self) -> dict[str, Any]:
        """The C of the logistic regression, by DinoBloom's rule."""
        return self.linear.chosen

    def predict(self, features: Features) -> dict[str, Tensor]:
        """By the names "1-NN", "20-NN" and "logistic"."""
        return {**self.knn.predict(features), **self.linear.predict(features)}


def fit_hematology(
    train: Features,
    *,
    device: str | torch.device = "cpu",
    world: World | None = None,
    progress: bool = False,
) -> BloodClassifier:
    """DinoBloom's evaluation: 1 and 20 neighbours with equal votes by distance, and logistic regression."""
    ks = tuple(k for k in BLOOD_NEIGHBOURS if k <= len(train.targets))
    knn = KnnClassifier(train, ks, "l2", None, torch.device(device), world or World(), progress)
    c = train.vector.shape[1] * len(train.targets.unique()) / BLOOD_SCALE
    fitted = fit_logistic(train.vector.to(device), train.targets, c, max_iterations=MAX_ITERATIONS)
    return BloodClassifier(knn, LogisticClassifier(fitted, {"c": c}))


# ---------------------------------------------------------------------- parts


def _choose_on(train: Features, val: Features | None) -> tuple[Tensor | None, dict[str, Tensor], Tensor]:
    """The rows to train on (None: all), and arrays and classes to choose on."""
    if val is not None:
        return None, val.arrays, val.targets
    rows, held = hold_out(train.targets)
    return rows, {name: array[held] for name, array in train.arrays.items()}, train.targets[held]


def _near(arrays: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The arrays on the device if they leave half of its memory free, else where they are."""
    size = sum(array.numel() * array.element_size() for array in arrays.values())
    if device.type != "cuda" or size > torch.cuda.mem_get_info(device)[0] / 2:
        return arrays
    return {name: array.to(device) for name, array in arrays.items()}


def _accuracy(labels: Tensor, targets: Tensor) -> float:
    return (labels == targets).double().mean().item()
