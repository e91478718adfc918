"""`quickvit eval knn`, `linear`, `hematology`, `segmentation` and `all`: what frozen features are good for."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor

from quickvit.bench.flops import count
from quickvit.cli.arguments import add_data
from quickvit.cli.command import Command
from quickvit.cli.frozen import (
    Frozen,
    Learned,
    add_classification,
    add_frozen,
    add_options,
    add_segmentation,
    classify,
    freeze,
    require_own_options,
    segment,
)
from quickvit.cli.output import NOTHING, print_json, print_table
from quickvit.evaluate.classification import Classifier
from quickvit.evaluate.extract import Features
from quickvit.evaluate.metrics import LABEL_METRICS, accuracy
from quickvit.evaluate.rotation import UPRIGHT
from quickvit.evaluate.segmentation import SegmentationData, SegmentationScores, Segmenter, from_patches
from quickvit.models import ViT
from quickvit.provenance import require_file

# Test images in a picture.
SHOWN, SHOWN_MASKS = 24, 6


def knn(arguments: Namespace) -> int:
    """Accuracy of the nearest training images' votes: DINOv2's k-NN."""
    return _classification("knn", arguments)


def linear(arguments: Namespace) -> int:
    """Accuracy of a linear classifier: DINOv2's grid of probes, or logistic regression for small sets."""
    return _classification("linear", arguments)


def hematology(arguments: Namespace) -> int:
    """Weighted F1, accuracy and balanced accuracy of 1-NN, 20-NN and logistic regression: DinoBloom's protocol."""
    return _classification("hematology", arguments)


def _classification(protocol: str, arguments: Namespace) -> int:
    _require_place(arguments.picture)
    _require_place(arguments.confusion, table=True)
    require_own_options(arguments, protocol)
    with freeze(arguments) as frozen:
        learned = classify(protocol, arguments, frozen)
        classifier, test = learned.fitted, learned.load(UPRIGHT)
        labels = classifier.predict(test)
    if not frozen.world.main:
        return 0
    confusions = {name: test.confusion(found) for name, found in labels.items()}
    scores = {name: {key: f(found) for key, f in LABEL_METRICS.items()} for name, found in confusions.items()}
    if arguments.json:
        result = {
            "protocol": protocol,
            "tested_on": test.source.name,
            "images": len(test.targets),
            "unreadable": test.unreadable,
            "answer": classifier.main,
            "accuracy": scores[classifier.main]["accuracy"],
            "answers": scores,
            "chosen": classifier.chosen,
            "tried": [asdict(trial) for trial in classifier.tried],
        }
        print_json({**frozen.about(arguments), **result})
    else:
        seen = f"{len(test.targets)} images of {test.source.name}, {test.unreadable} could not be read"
        print(f"{_sentence(protocol, classifier, scores)}; {seen}")
    if arguments.confusion is not None:
        _write_confusion(arguments.confusion, confusions[classifier.main], test.source.classes)
    if arguments.picture is not None:
        _draw_predictions(arguments.picture, test, labels[classifier.main])
    return 0


def _sentence(protocol: str, classifier: Classifier, scores: Mapping[str, Mapping[str, float]]) -> str:
    """The result in one line."""
    if protocol == "hematology":
        words = {"weighted_f1": "wF1", "accuracy": "acc", "balanced_accuracy": "bAcc"}
        answers = (
            (name, [f"{words[key]} {value:.2%}" for key, value in found.items()])
            for name, found in scores.items()
        )
        return "; ".join(f"{name} {', '.join(values)}" for name, values in answers)
    others = [f"{name} {found['accuracy']:.2%}" for name, found in scores.items() if name != classifier.main]
    details = ", ".join([_words(classifier.chosen), *others])
    return f"{classifier.main} {scores[classifier.main]['accuracy']:.2%} ({details})"


def segmentation(arguments: Namespace) -> int:
    """Mean IoU and pixel accuracy of k-NN and of logistic regression on patches: CAPI's protocol."""
    _require_place(arguments.picture)
    with freeze(arguments) as frozen:
        learned = segment(arguments, frozen)
        test = learned.load(UPRIGHT)
        scores = learned.fitted.evaluate(test, progress=True)
    if not frozen.world.main:
        return 0
    images, unreadable = len(test.masks), len(learned.test) - len(test.masks)
    if arguments.json:
        result = {
            "protocol": "segmentation",
            "images": images,
            "unreadable": unreadable,
            "answers": {name: _segmentation_scores(found) for name, found in scores.items()},
        }
        print_json({**frozen.about(arguments), **result})
    else:
        sentences = (
            f"{name} mIoU {found.mean_iou:.2%}, pixel accuracy {found.pixel_accuracy:.2%} ({_words(found.chosen)})"
            for name, found in scores.items()
        )
        print(f"{'; '.join(sentences)}; {images} images, {unreadable} could not be read")
    if arguments.picture is not None:
        _draw_masks(arguments.picture, learned)
    return 0


def _segmentation_scores(scores: SegmentationScores) -> dict[str, Any]:
    return {
        "mean_iou": scores.mean_iou,
        "mean_iou_of_classes": scores.mean_iou_of_classes,
        "pixel_accuracy": scores.pixel_accuracy,
        "chosen": scores.chosen,
        "tried": [asdict(trial) for trial in scores.tried],
    }


def everything(arguments: Namespace) -> int:
    """Fill rows of the paper's tables of DINOv2 models: linear and k-NN on five data sets, or some of them."""
    if not any(arguments[place] for place in PLACES):
        raise ValueError(f"give at least one of {', '.join(f'--{place}' for place in PLACES)}")
    with freeze(arguments) as frozen:
        row: dict[str, float | None] = {}
        for place, score in PLACES.items():
            found = score(Namespace(data=arguments[place]), frozen) if arguments[place] else {}
            row |= {f"{place} {name}": found.get(name) for name in ("linear", "knn")}
    if not frozen.world.main:
        return 0
    model = frozen.backbone.model
    gmacs = count(model).macs / 1e9 if isinstance(model, ViT) else None
    if arguments.json:
        print_json({"protocol": "all", **frozen.about(arguments), "gmacs": gmacs, **row})
    else:
        header = ["model", "GMACs", *(key.replace("knn", "k-NN") for key in row)]
        cells = [gmacs, *(None if value is None else 100 * value for value in row.values())]
        words = [NOTHING if cell is None else f"{cell:.1f}" for cell in cells]
        print_table(header, [[arguments.model, *words]])
    return 0


def _accuracies(data: Namespace, frozen: Frozen) -> dict[str, float]:
    """Accuracy of the linear probe and of k-NN."""
    scores = {}
    for protocol in ("linear", "knn"):
        learned = classify(protocol, data, frozen)
        test = learned.load(UPRIGHT)
        scores[protocol] = accuracy(test.confusion(learned.fitted.predict(test)[learned.fitted.main]))
    return scores


def _mean_ious(data: Namespace, frozen: Frozen) -> dict[str, float]:
    """Mean IoU of logistic regression and of k-NN."""
    learned = segment(data, frozen)
    scores = learned.fitted.evaluate(learned.load(UPRIGHT), progress=True)
    return {name: found.mean_iou for name, found in scores.items()}


# The data sets of the paper's tables, and what is measured on them.
PLACES = {
    "imagenet": _accuracies,
    "inaturalist": _accuracies,
    "places365": _accuracies,
    "ade20k": _mean_ious,
    "voc2012": _mean_ious,
}


# ---------------------------------------------------------------------- words and pictures


def _words(chosen: Mapping[str, Any]) -> str:
    """Hyper-parameters for a human reader."""

    def word(value: Any) -> str:
        if isinstance(value, tuple):
            return "+".join(value)
        return f"{value:g}" if isinstance(value, float) else str(value)

    return ", ".join(f"{key.replace('_', ' ')} {word(value)}" for key, value in chosen.items())


def _is_csv(path: str | None) -> bool:
    return path is not None and Path(path).suffix.lower() == ".csv"


def _require_place(path: str | None, *, table: bool = False) -> None:
    """Say before the work, not after it, that a picture, or with `table` a CSV file, cannot be written."""
    if path is None:
        return
    require_file(path)
    if table and _is_csv(path):
        return
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError('pictures need matplotlib: pip install "quickvit[demo]"', name="matplotlib")
    from matplotlib.backend_bases import FigureCanvasBase

    formats = sorted(FigureCanvasBase.get_supported_filetypes())
    if Path(path).suffix.lower().removeprefix(".") not in formats:
        raise ValueError(
            f"cannot write {path}: expected the name of {'a CSV file or ' if table else ''}a picture, which ends in "
            f"one of {', '.join(f'.{name}' for name in formats)}"
        )


def _write_confusion(path: str, confusion: Tensor, classes: Sequence[str]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if not _is_csv(path):
        from quickvit.report.evaluation_figure import draw_confusion

        draw_confusion(confusion, classes, Path(path))
        return
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["true class", *classes])
        writer.writerows([name, *row] for name, row in zip(classes, confusion.tolist(), strict=True))


def _draw_predictions(path: str, test: Features, labels: Tensor) -> None:
    from quickvit.report.evaluation_figure import draw_predictions

    rows = torch.linspace(0, len(labels) - 1, min(SHOWN, len(labels))).long()
    classes = test.source.classes
    draw_predictions(
        [test.source.read(int(test.indices[row])).image for row in rows],
        [(classes[int(test.targets[row])], classes[int(labels[row])]) for row in rows],
        Path(path),
    )


def _draw_masks(path: str, learned: Learned[Segmenter, SegmentationData]) -> None:
    """The first test images, their masks, and what both classifiers say."""
    from quickvit.report.evaluation_figure import draw_masks

    test = learned.load(UPRIGHT)
    shown = range(min(SHOWN_MASKS, len(test.masks)))
    columns = {"mask": test.masks[list(shown)]}
    labels = learned.fitted.label(test.features[list(shown)].flatten(0, 2))
    for name, pixels in labels.items():
        columns[name] = from_patches(pixels.cpu(), test.size, test.grid)
    images = [
        learned.transform.pixels(learned.test.read(i).image) for i in test.indices[list(shown)].tolist()
    ]
    draw_masks(images, columns, test.ignored, Path(path))


# ---------------------------------------------------------------------- arguments


def _add(protocol: str, parser: ArgumentParser) -> None:
    add_frozen(parser)
    add_data(parser)
    add_options(parser, protocol)
    if protocol == "segmentation":
        add_segmentation(parser)
    else:
        add_classification(parser)
        parser.add_argument("--confusion", help="file for the confusion matrix: CSV, or a picture")
    parser.add_argument("--picture", help="file for a picture of test images and what was predicted")


def _add_everything(parser: ArgumentParser) -> None:
    add_frozen(parser)
    for place in PLACES:
        parser.add_argument(f"--{place}", help="folder of the data set")


EVALUATIONS: dict[str, Command] = {
    "knn": Command(knn, partial(_add, "knn")),
    "linear": Command(linear, partial(_add, "linear")),
    "hematology": Command(hematology, partial(_add, "hematology")),
    "segmentation": Command(segmentation, partial(_add, "segmentation")),
    "all": Command(everything, _add_everything),
}
