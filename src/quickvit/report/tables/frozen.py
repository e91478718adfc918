"""Tables of frozen features: what self-supervised models are good for without fine-tuning."""

from __future__ import annotations

from collections import defaultdict
from functools import partial

from quickvit.report import paper
from quickvit.report.results import QUARTER, UPRIGHT, Results, Run
from quickvit.report.table import NOTHING, Column, Table, unique
from quickvit.report.tables.beside import family_name, quotation
from quickvit.report.tables.measures import GMACS, Measure, Quote, Shown, headings, row
from quickvit.report.tables.studies import FAMILIES, study_command

STUDY = "dinov2"
COMPARED = ("vit", "h8", "i8")
# The names that a linear classifier and k-NN may have; 20 is the k of DINOv2's and DinoBloom's tables.
LINEAR, NEIGHBOURS = ("linear", "logistic"), ("knn", "20-NN")
CLASSIFIERS = ("1-NN", "20-NN", "logistic")
METRICS = {"weighted_f1": "wF1", "accuracy": "Acc", "balanced_accuracy": "bAcc"}
COMMANDS = (
    study_command(STUDY, "pbc_blood_96"),
    "quickvit train dinov2 --model quickvit_h8_large_patch16_224 --data IMAGENET --out RUN",
    "python benchmarks/study/record.py RUN --imagenet IMAGENET --inaturalist INATURALIST --places365 PLACES365 "
    "--ade20k ADE20K --voc2012 VOC2012",
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
SCORES: tuple[Shown, ...] = (
    *(LINEAR_SCORE, Quote(LINEAR_SCORE.title, "linear")),
    *(NEIGHBOUR_SCORE, Quote(NEIGHBOUR_SCORE.title, "knn"), TURNED),
    *(GMACS, Quote(GMACS.title, "gmacs")),
)


def frozen_features(results: Results) -> Table:
    """Linear classifiers and nearest neighbours, on our data and on the paper's."""
    found: dict[tuple[str, str, str], list[Run]] = defaultdict(list)
    quoted = {**paper.DINOV2.rows, **paper.DINOV2_MORE.rows}
    labels = {
        (f"{data}-{model.split('/')[0].removeprefix('ViT-').lower()}", family): (data, model)
        for data, model, family in quoted
    }
    for run in results.study(STUDY):
        model = f"ViT-{run.size.capitalize()}" if run.size else NOTHING
        data, model = labels.get((run.dataset, run.name), (run.dataset, model))
        found[data, model, run.name].append(run)
    rows = []
    for key in dict.fromkeys([*sorted(found, key=_place), *quoted]):
        data, model, family = key
        cells = row(SCORES, found.get(key, []), quoted.get(key, {}))
        rows.append((model, family_name(family), paper.DATA.get(data, data), *cells))
    return Table(
        "frozen-features",
        "Frozen features after DINOv2",
        (Column("model"), Column("family"), Column("data"), *headings(SCORES)),
        tuple(rows),
        quotation(paper.DINOV2, paper.DINOV2_MORE),
        "The paper's numbers of iNaturalist and Places are, cell by cell, those that it has of ImageNet-1K and "
        "ADE20K. Accuracy; mean IoU on ADE20K and VOC 2012. On blood cells, linear and k-NN are the logistic "
        "regression and the 20 nearest neighbours of DinoBloom's protocol, see the next table; the paper's are those "
        "of DINOv2's.",
        unique(run.source for run in results.study(STUDY)),
        COMMANDS,
    )


def _place(key: tuple[str, str, str]) -> tuple[str, str, int, str]:
    """The place of a row in the table: families in their order."""
    data, model, family = key
    return data, model, FAMILIES.index(family) if family in FAMILIES else len(FAMILIES), family


def hematology(results: Results) -> Table:
    """Blood cells, by DinoBloom's protocol."""
    runs = [run for run in results.study(STUDY) if any(answer(run, f"{c}/accuracy") for c in CLASSIFIERS)]
    families = [f for f in FAMILIES if f in paper.HEMATOLOGY.rows or any(run.name == f for run in runs)]
    rows = []
    for dataset in sorted({run.dataset for run in runs}) or [NOTHING]:
        for family in families:
            mine = [run for run in runs if (run.dataset, run.name) == (dataset, family)]
            quoted = paper.HEMATOLOGY.rows.get(family, {})
            rows += [
                (family_name(family), classifier, dataset, *row(_blood_scores(classifier), mine, quoted))
                for classifier in CLASSIFIERS
            ]
    return Table(
        "hematology",
        "Blood cells",
        (Column("family"), Column("classifier"), Column("data"), *headings(_blood_scores(CLASSIFIERS[0]))),
        tuple(rows),
        quotation(paper.HEMATOLOGY),
        "Weighted F1, accuracy and balanced accuracy of frozen features by DinoBloom's protocol. Other cells than "
        "the paper's: compare the rows.",
        unique(run.source for run in runs),
        (COMMANDS[0],),
    )


def progress(results: Results) -> Table:
    """Frozen features in the course of a training without labels."""
    runs = [run for run in results.study(STUDY) if run.progress]
    rows = []
    for dataset in sorted({run.dataset for run in runs}) or [NOTHING]:
        for family in [f for f in FAMILIES if f in COMPARED or any(run.name == f for run in runs)]:
            mine = [run for run in runs if (run.dataset, run.name) == (dataset, family)]
            for step in sorted({step for run in mine for step, _ in run.progress}) or [0]:
                names = family_name(family), dataset, str(len(mine)), f"{step:,}"
                rows += [(*names, c, *row(_scores_after(step, c), mine, {})) for c in CLASSIFIERS]
    return Table(
        "progress",
        "Blood cells in the course of DINOv2",
        (
            *map(Column, ("family", "data", "seeds", "updates", "classifier")),
            *headings(_scores_after(0, CLASSIFIERS[0])),
        ),
        tuple(rows),
        note="Frozen features of the teacher by DinoBloom's protocol: classifiers of upright training images, asked "
        "of upright test images, and of the same turned by random multiples of 90°.",
        sources=unique(run.source for run in runs),
        commands=(COMMANDS[0],),
    )


def _scores_after(step: int, classifier: str) -> list[Shown]:
    """Each metric after so many updates, upright and turned."""

    def after(run: Run, metric: str, pose: str) -> float | None:
        return run.answers(pose, step).get(classifier, {}).get(metric)

    return [
        Measure(f"{word} (%){words}", partial(after, metric=metric, pose=pose), 2)
        for pose, words in ((UPRIGHT, ""), (QUARTER, ", turned"))
        for metric, word in METRICS.items()
    ]


def _blood_scores(classifier: str) -> list[Shown]:
    """The columns of a classifier: each metric, ours and the paper's."""
    columns: list[Shown] = []
    for metric, word in METRICS.items():
        key, title = f"{classifier}/{metric}", f"{word} (%)"
        columns += [Measure(title, partial(answer, key=key), 2), Quote(title, key)]
    return columns


def answer(run: Run, key: str) -> float | None:
    """A score of DinoBloom's protocol, by classifier/metric; an accuracy may come from the upright pose."""
    classifier, metric = key.split("/")
    found = run.answers().get(classifier, {}).get(metric)
    return run.score(classifier) if found is None and metric == "accuracy" else found
