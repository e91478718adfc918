"""`quickvit eval rotation`: what turned and mirrored images do to a model's answers and features."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import torch
from jsonargparse import ArgumentParser, Namespace
from torch import Tensor

from quickvit.cli.accuracy import accuracies
from quickvit.cli.arguments import add_data, add_poses
from quickvit.cli.command import Command
from quickvit.cli.frozen import (
    CLASSIFICATION,
    OPTIONS,
    add_classification,
    add_frozen,
    add_options,
    classify,
    freeze,
    require_own_options,
    segment,
)
from quickvit.cli.output import print_json, print_table
from quickvit.data import Source, Transform, Unreadable
from quickvit.evaluate import POSES
from quickvit.evaluate.poses import PoseScores, classify_in_poses, feature_errors, segment_in_poses
from quickvit.evaluate.rotation import cut_circle, require_square

PROTOCOLS = ("accuracy", *CLASSIFICATION, "segmentation")
LISTS = "train_list", "val_list", "test_list"
# Test images whose features are compared.
COMPARED = 16


def rotation(arguments: Namespace) -> int:
    """Answers on turned and mirrored images beside those on upright ones: a classifier's, or frozen features'."""
    require_own_options(arguments, arguments.protocol)
    if arguments.protocol not in CLASSIFICATION:
        for name in LISTS:
            if arguments[name] is not None:
                raise ValueError(f"--{name.replace('_', '-')} is for --protocol {', '.join(CLASSIFICATION)}")
    if arguments.protocol == "accuracy":
        if arguments.cache is not None:
            raise ValueError(f"--cache is for --protocol {', '.join(PROTOCOLS[1:])}, got accuracy")
        arguments.split = arguments.split or "val"
        return accuracies(arguments, POSES)
    with freeze(arguments) as frozen:
        require_square(frozen.backbone.img_size, POSES)
        if arguments.protocol == "segmentation":
            masks = segment(arguments, frozen)
            rows = segment_in_poses(masks.fitted, masks.load, POSES)
            test, transform, shown = masks.test, masks.transform, list(rows[0].scores)
        else:
            labels = classify(arguments.protocol, arguments, frozen)
            rows = classify_in_poses(labels.fitted, labels.load, POSES)
            test, transform, shown = labels.test, labels.transform, [labels.fitted.main]
            if arguments.protocol == "hematology":
                shown = list(rows[0].scores)
        if not frozen.world.main:
            return 0
        images = _some_images(test, transform)
        images = cut_circle(images) if frozen.circle else images
        errors: dict[str, dict[str, float]] = {}
        try:
            errors = feature_errors(frozen.backbone, images.to(frozen.world.device))
        except ValueError as error:
            # The scores are worth having without.
            last = f"no errors of the features: {error}"
        else:
            worst = {name: max(by_element.values()) for name, by_element in errors.items()}
            words = ", ".join(f"{name} {error:.1e}" for name, error in worst.items())
            last = f"worst error of the features under the eight elements, relative to their spread: {words}"
    if arguments.json:
        table = [{**asdict(row), "pose": str(row.pose), "changes": row.changes(rows[0])} for row in rows]
        result = {"protocol": arguments.protocol, "rows": table, "feature_errors": errors}
        result |= {} if errors else {"remark": last}
        print_json({**frozen.about(arguments), **result})
        return 0
    print_table(*_table(rows, shown))
    print(f"\n{last}")
    return 0


def _table(rows: Sequence[PoseScores], names: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """Per cent of each answer, its change, and the share of images that are labelled as upright."""
    header, table = ["pose"], [[str(row.pose)] for row in rows]
    for name in names:
        header += [f"{name} (%)", "change"]
        for line, row in zip(table, rows, strict=True):
            line += [f"{100 * row.scores[name]:.2f}", f"{100 * row.changes(rows[0])[name]:+.2f}"]
            if row.same is not None:
                line.append(f"{100 * row.same[name]:.2f}")
        header += ["same (%)"] if rows[0].same is not None else []
    return header, table


def _some_images(source: Source, transform: Transform) -> Tensor:
    """The first readable images."""
    images: list[Tensor] = []
    for index in range(len(source)):
        try:
            images.append(transform(source.read(index).image, 0))
        except Unreadable:
            continue
        if len(images) == COMPARED:
            break
    return torch.stack(images)


def _add_rotation(parser: ArgumentParser) -> None:
    add_frozen(parser, dtype="float32")
    add_data(parser)
    add_poses(parser)
    parser.add_argument("--protocol", choices=PROTOCOLS, default=PROTOCOLS[0], help="what is asked")
    others = " and ".join(sorted({*PROTOCOLS} - {*CLASSIFICATION}))
    add_classification(parser, f"val for {others}, else test, or val where there is none")
    for protocol in OPTIONS:
        add_options(parser, protocol)


EVALUATIONS: dict[str, Command] = {"rotation": Command(rotation, _add_rotation)}
