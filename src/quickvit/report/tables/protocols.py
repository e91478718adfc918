"""Tables of frozen features on small sets of real images: every protocol, upright and turned."""

from __future__ import annotations

from collections.abc import Sequence

from quickvit.report.results import QUARTER, SLANTED, UPRIGHT, Evaluation, Results
from quickvit.report.sample import number
from quickvit.report.table import HERE, NOT_RUN, NOTHING, Column, Table, unique

LABELS = {"accuracy": "Acc (%)", "weighted_f1": "wF1 (%)", "balanced_accuracy": "bAcc (%)"}
MASKS = {"mean_iou": "mIoU (%)", "pixel_accuracy": "pixels (%)"}
POSES = ("90°", "mirrored", QUARTER, SLANTED)
NOTE = (
    "Models have the names that they were given; the commands say what each is, and where options differ from the "
    "protocol's."
)
COMMANDS = ("benchmarks/study/frozen.sh PBC CAMVID benchmarks/frozen NAME=MODEL",)


def image_labels(results: Results) -> Table:
    """Classes of images, from neighbours and linear classifiers."""
    return _answered(results, "frozen-labels", "Frozen features: classes of images", LABELS)


def masks(results: Results) -> Table:
    """Classes of pixels, from neighbours and logistic regression on patches."""
    return _answered(results, "frozen-masks", "Frozen features: classes of pixels", MASKS)


def turned_answers(results: Results) -> Table:
    """What turned images do to both."""
    shown = [evaluation for evaluation in results.evaluations if evaluation.scores]
    rows = [
        (
            evaluation.dataset,
            evaluation.label,
            classifier,
            number(score, 2),
            *_changes(evaluation, classifier),
        )
        for evaluation in shown
        for classifier, score in evaluation.scores.get(UPRIGHT, {}).items()
    ]
    columns = (Column("upright (%)", HERE), *(Column(pose, HERE) for pose in POSES))
    return _table("frozen-turned", "Frozen features: images turned", columns, rows, shown)


def _answered(results: Results, id: str, title: str, metrics: dict[str, str]) -> Table:
    """A row for each classifier with one of these metrics."""
    rows, shown = [], []
    for evaluation in results.evaluations:
        for classifier, scores in evaluation.answers.items():
            if not scores.keys() & metrics.keys():
                continue
            cells = (number(scores[metric], 2) if metric in scores else NOTHING for metric in metrics)
            rows.append((evaluation.dataset, evaluation.label, _name(evaluation, classifier), *cells))
            shown.append(evaluation)
    return _table(id, title, tuple(Column(word, HERE) for word in metrics.values()), rows, shown)


def _table(
    id: str,
    title: str,
    columns: tuple[Column, ...],
    rows: Sequence[tuple[str, ...]],
    shown: Sequence[Evaluation],
) -> Table:
    head = (Column("data"), Column("model"), Column("classifier"))
    missing = ((NOTHING,) * len(head) + (NOT_RUN,) * len(columns),)
    sources = unique(evaluation.source for evaluation in shown)
    return Table(
        id, title, (*head, *columns), tuple(rows) or missing, note=NOTE, sources=sources, commands=COMMANDS
    )


def _name(evaluation: Evaluation, classifier: str) -> str:
    """Hematology and k-NN both have neighbours, with votes that weigh differently."""
    named = evaluation.protocol in ("linear", "segmentation") or classifier == "logistic"
    return classifier if named else f"{classifier}, {evaluation.protocol}"


def _changes(evaluation: Evaluation, classifier: str) -> list[str]:
    upright = evaluation.scores[UPRIGHT][classifier]
    found = (evaluation.scores.get(pose, {}).get(classifier) for pose in POSES)
    return [NOT_RUN if score is None else number(score - upright, 2, sign=True) for score in found]
