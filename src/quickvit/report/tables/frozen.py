"""Tables of frozen features: what self-supervised models are good for without fine-tuning."""

from __future__ import annotations

import re
from collections.abc import Iterator

from quickvit.report import paper
from quickvit.report.results import QUARTER, Results, Run
from quickvit.report.sample import number
from quickvit.report.table import HERE, NOTHING, PAPER, Column, Table, unique
from quickvit.report.tables.beside import family_name, quotation
from quickvit.report.tables.measures import GMACS, Measure
from quickvit.report.tables.studies import FAMILIES

STUDY = "dinov2"
# The names that a linear classifier and k-NN may have; 20 is the k of DINOv2's and DinoBloom's tables.
LINEAR, NEIGHBOURS = ("linear", "logistic"), ("knn", "20-NN")
CLASSIFIERS = ("1-NN", "20-NN", "logistic")
METRICS = {"weighted_f1": "wF1", "accuracy": "Acc", "balanced_accuracy": "bAcc"}
COMMANDS = (
    "benchmarks/study/pbc.sh DATA OUT",
    "quickvit train dinov2 --model quickvit_h8_large_patch16_224 --data IMAGENET --out RUN",
    "quickvit eval all RUN --imagenet IMAGENET --ade20k ADE20K --voc2012 VOC2012",
)


def linear(run: Run) -> float | None:
    """Accuracy of a linear classifier."""
    return first(run, LINEAR)


def neighbours(run: Run) -> float | None:
    """Accuracy of nearest neighbours."""
    return first(run, NEIGHBOURS)


def turned(run: Run) -> float | None:
    """Change of the latter on images turned by random multiples of 90°."""
    name = next((name for name in NEIGHBOURS if run.score(name) is not None), "")
    return run.change(name, QUARTER)


def first(run: Run, names: tuple[str, ...]) -> float | None:
    """The first of these scores that a run has."""
    return next((score for name in names if (score := run.score(name)) is not None), None)


LINEAR_SCORE = Measure("linear (%)", linear, 2)
NEIGHBOUR_SCORE = Measure("k-NN (%)", neighbours, 2)
TURNED = Measure("k-NN, turned by 90°s", turned, 2, sign=True)
SCORES = {"gmacs": GMACS, "linear": LINEAR_SCORE, "knn": NEIGHBOUR_SCORE}


def frozen_features(results: Results) -> Table:
    """Linear classifiers and nearest neighbours, on our data and on the paper's."""
    runs = results.study(STUDY)
    own = sorted(
        {(run.dataset, _size(run), run.name) for run in runs}, key=lambda key: (*key[:2], _rank(key[2]))
    )
    rows = []
    for key in dict.fromkeys([*own, *paper.DINOV2.rows]):
        dataset, model, family = key
        mine = [
            run
            for run in runs
            if (run.dataset, _size(run), run.name) == (dataset, model.split("/")[0], family)
        ]
        quoted = paper.DINOV2.rows.get(key, {})
        theirs = (number(quoted[name], 1) if name in quoted else NOTHING for name in SCORES)
        ours = (measure.cell(mine) for measure in SCORES.values())
        pairs = (cell for pair in zip(ours, theirs, strict=True) for cell in pair)
        rows.append((model, family_name(family), dataset, *pairs, TURNED.cell(mine)))
    return Table(
        "frozen-features",
        "Frozen features after DINOv2",
        (
            *(Column("model"), Column("family"), Column("data")),
            *(c for m in SCORES.values() for c in (Column(m.title, HERE), Column(m.title, PAPER))),
            Column(TURNED.title, HERE),
        ),
        tuple(rows),
        quotation(paper.DINOV2),
        "Accuracy; mean IoU on ADE20K and VOC 2012.",
        unique(run.source for run in runs),
        COMMANDS,
    )


def hematology(results: Results) -> Table:
    """Blood cells, by DinoBloom's protocol."""
    runs = [run for run in results.study(STUDY) if answers(run)]
    rows = []
    for dataset in sorted({run.dataset for run in runs}) or [NOTHING]:
        families = [f for f in FAMILIES if f in paper.HEMATOLOGY.rows or any(run.name == f for run in runs)]
        for family in families:
            mine = [run for run in runs if (run.dataset, run.name) == (dataset, family)]
            for classifier in CLASSIFIERS:
                quoted = paper.HEMATOLOGY.rows.get(family, {})
                keys = [f"{classifier}/{metric}" for metric in METRICS]
                ours = (_score(key).cell(mine) for key in keys)
                theirs = (number(quoted[key], 1) if key in quoted else NOTHING for key in keys)
                pairs = (cell for pair in zip(ours, theirs, strict=True) for cell in pair)
                rows.append((family_name(family), classifier, dataset, *pairs))
    return Table(
        "hematology",
        "Blood cells",
        (
            *(Column("family"), Column("classifier"), Column("data")),
            *(
                c
                for word in METRICS.values()
                for c in (Column(f"{word} (%)", HERE), Column(f"{word} (%)", PAPER))
            ),
        ),
        tuple(rows),
        quotation(paper.HEMATOLOGY),
        "Weighted F1, accuracy and balanced accuracy of frozen features by DinoBloom's protocol. Other cells than "
        "the paper's: compare the rows.",
        unique(run.source for run in runs),
        (COMMANDS[0],),
    )


def answers(run: Run) -> dict[str, float]:
    """All scores of DinoBloom's protocol, by classifier and metric; accuracies may come from the upright pose."""
    return {f"{classifier}/{metric}": score for classifier, metric, score in _answers(run)}


def _answers(run: Run) -> Iterator[tuple[str, str, float]]:
    for classifier in CLASSIFIERS:
        if (score := run.score(classifier)) is not None:
            yield classifier, "accuracy", score
        for metric, score in run.answers.get(classifier, {}).items():
            yield classifier, metric, score


def _score(key: str) -> Measure:
    return Measure(key, lambda run: answers(run).get(key), 2)


def _size(run: Run) -> str:
    """The size in the name of a model, as in baseline_small_patch16_224."""
    found = re.search(r"_([a-z0-9]+)_patch\d+", run.model)
    return f"ViT-{found[1].capitalize()}" if found else NOTHING


def _rank(family: str) -> tuple[int, str]:
    """The place of a family in a table."""
    return (FAMILIES.index(family) if family in FAMILIES else len(FAMILIES)), family
