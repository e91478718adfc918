"""`quickvit eval accuracy`: how often a classifier is right."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from quickvit.cli.arguments import PRECISIONS, add_data, add_model, add_poses
from quickvit.cli.build import choose_device, load_announced
from quickvit.cli.command import Command
from quickvit.cli.output import NOTHING, print_json, print_table
from quickvit.data import open_source, preprocessing
from quickvit.evaluate import AccuracyReport, Pose, measure_accuracy
from quickvit.evaluate.rotation import require_square
from quickvit.provenance import surroundings
from quickvit.train.distributed import connected

RANDOM = {"random": "any", "random90": "quarter"}
# The arguments that a result is reported with.
REPORTED = ("model", "checkpoint", "data", "split", "dtype", "circle", "seed")
HEADER = {
    "pose": "pose",
    "top1": "top-1 (%)",
    "top1_change": "change",
    "top5": "top-5 (%)",
    "top5_change": "change",
}


def accuracy(arguments: Namespace) -> int:
    """Top-1 and top-5 accuracy of a classifier on images as they are, or turned and mirrored."""
    return accuracies(arguments, [Pose(_rotation(arguments.rotate), arguments.mirror)])


def accuracies(arguments: Namespace, poses: Sequence[Pose]) -> int:
    """Print the accuracy in each pose and how it differs from the first."""
    if arguments.device is not None:
        choose_device(arguments.device)
    with connected(arguments.device) as world:
        model = load_announced(arguments, world).to(world.device)
        transform = preprocessing(model)
        require_square(transform.size, poses)
        report = measure_accuracy(
            model,
            open_source(arguments.data, arguments.split),
            transform,
            poses,
            world=world,
            batch_size=arguments.batch_size,
            workers=arguments.workers,
            dtype=PRECISIONS[arguments.dtype],
            circle=arguments.circle,
            seed=arguments.seed,
            max_unreadable=arguments.max_unreadable,
            progress=True,
        )
    if not world.main:
        return 0
    if arguments.json:
        print_json(
            {
                "protocol": "accuracy",
                **{key: arguments[key] for key in REPORTED},
                **surroundings(world.device, arguments.command_line),
                "preprocessing": asdict(transform),
                "images": report.images,
                "unreadable": dict(report.unreadable),
                "rows": _rows(report),
            }
        )
        return 0
    header = [HEADER[key] for key in _rows(report)[0]]
    print_table(header, [[_cell(key, value) for key, value in row.items()] for row in _rows(report)])
    print(f"\n{report.images} images; {len(report.unreadable)} could not be read")
    return 0


def _rows(report: AccuracyReport) -> list[dict[str, Any]]:
    """Accuracies in per cent and, of several, how they differ from the first."""
    first = report.rows[0]
    rows = []
    for accuracy in report.rows:
        row: dict[str, Any] = {"pose": str(accuracy.pose)}
        for key in ("top1", "top5"):
            value, reference = getattr(accuracy, key), getattr(first, key)
            row[key] = None if value is None else 100 * value
            if len(report.rows) > 1:
                row[f"{key}_change"] = None if value is None else 100 * (value - reference)
        rows.append(row)
    return rows


def _cell(key: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or NOTHING
    return f"{value:+.2f}" if key.endswith("_change") else f"{value:.2f}"


def _rotation(text: str) -> Any:
    """Degrees, or the name of a random rotation."""
    if text in RANDOM:
        return RANDOM[text]
    if re.fullmatch(r"-?\d+(\.\d+)?", text):
        return float(text)
    raise ValueError(f"--rotate takes degrees, {' or '.join(RANDOM)}; got {text!r}")


# ---------------------------------------------------------------------- arguments


def _add_accuracy(parser: ArgumentParser) -> None:
    add_model(parser)
    add_data(parser)
    add_poses(parser)
    parser.add_argument("--split", default="val", help="train, val, test or all")
    parser.add_argument("--rotate", default="0", help="degrees anti-clockwise, random or random90")
    parser.add_argument("--mirror", action="store_true", help="mirror left to right, before rotating")


EVALUATIONS: dict[str, Command] = {
    "accuracy": Command(accuracy, _add_accuracy),
}
