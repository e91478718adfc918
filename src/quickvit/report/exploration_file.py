"""An exploration as a file, so that a page can be made of it without the models and the images.

Files are not trusted: what is read has the shapes that an exploration has, and pictures are pictures.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from quickvit.group import D8
from quickvit.report.entry import Entry, open_entry, read_source
from quickvit.report.exploration import POSES, Answers, Exploration, IrrepCopy
from quickvit.report.packed import pack, unpack
from quickvit.report.weights import COMPONENTS, component_name

# Bytes of a file, and pixels of the side of a picture.
LARGEST, LARGEST_SIDE = 1_000_000, 1024
IRREPS = {irrep.name: irrep for irrep in D8.irreps}
FILTERS = [component_name(irrep, i) for irrep in D8.irreps for i in range(irrep.dim)]
# Of probabilities that were rounded.
TOLERANCE = 0.05


def save_exploration(exploration: Exploration, path: str | Path, provenance: Mapping[str, Any]) -> None:
    """Write an exploration as JSON; `provenance` is what `quickvit.provenance.surroundings` says of its making."""
    answers = torch.stack([answers.probabilities for answers in exploration.answers], dim=1)
    record = {
        "models": [answers.model for answers in exploration.answers],
        "classes": exploration.classes,
        "chosen": exploration.chosen,
        "credit": exploration.credit,
        "copies": [{"irrep": copy.irrep.name, "channels": copy.channels} for copy in exploration.copies],
        "images": [
            {
                "target": exploration.targets[number],
                "picture": base64.b64encode(picture).decode(),
                "answers": pack(answers[number]),
                "features": [pack(maps[number]) for maps in exploration.features],
            }
            for number, picture in enumerate(exploration.pictures)
        ],
        "filters": {name: pack(filters, 8) for name, filters in exploration.filters.items()},
        "provenance": provenance,
    }
    text = json.dumps(record, indent=1) + "\n"
    if len(text) > LARGEST:
        raise ValueError(
            f"the file would have {len(text) / 1e6:.1f} MB, more than {LARGEST / 1e6:g} MB; explore fewer than "
            f"{len(exploration.pictures)} images, or fewer channels"
        )
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def read_exploration(path: str | Path) -> Exploration:
    """The exploration that was saved in a file."""
    path = Path(path)
    if path.stat().st_size > LARGEST:
        raise ValueError(f"{path}: {path.stat().st_size / 1e6:.1f} MB; expected at most {LARGEST / 1e6:g} MB")
    record = open_entry(path, path.parent)
    models, classes = record.texts("models"), record.texts("classes")
    if len(models) != 2:
        raise record.wrong("models", "the names of two models")
    if not classes:
        raise record.wrong("classes", "at least one name")
    copies = tuple(_copy(entry) for entry in record.entries("copies", required=True))
    if {copy.irrep.name for copy in copies} != set(IRREPS):
        raise record.wrong("copies", f"at least one of each of {', '.join(IRREPS)}")
    images = record.entries("images", required=True)
    if not images:
        raise record.wrong("images", "at least one")
    pictures = tuple(_picture(entry) for entry in images)
    answers = torch.stack([_answers(entry, len(classes)) for entry in images])
    features = [list(_features(entry, copies)) for entry in images]
    if len({maps.shape[-2:] for image in features for maps in image}) > 1:
        raise record.wrong("images", "features of the same size")
    return Exploration(
        pictures=pictures,
        classes=classes,
        targets=tuple(_target(entry, len(classes)) for entry in images),
        copies=copies,
        features=tuple(torch.stack(maps) for maps in zip(*features, strict=True)),
        answers=(Answers(models[0], answers[:, 0]), Answers(models[1], answers[:, 1])),
        filters=_filters(record.entry("filters")),
        chosen=record.text("chosen", ""),
        credit=record.text("credit", ""),
        source=read_source(record.entry("provenance")),
    )


# ---------------------------------------------------------------------- parts


def _copy(entry: Entry) -> IrrepCopy:
    irrep = IRREPS.get(entry.text("irrep"))
    if irrep is None:
        raise entry.wrong("irrep", f"one of {', '.join(IRREPS)}")
    channels = entry.integers("channels")
    if len(channels) != irrep.dim or min(channels) < 0:
        raise entry.wrong("channels", f"the numbers of {irrep.dim} channels")
    return IrrepCopy(irrep, tuple(channels))


def _target(entry: Entry, classes: int) -> int:
    target = entry.integer("target")
    if not -1 <= target < classes:
        raise entry.wrong("target", f"the number of one of {classes} classes, or -1")
    return target


def _picture(entry: Entry) -> bytes:
    """A PNG or JPEG file of a square image that is not too large, and can be decoded."""
    try:
        file = base64.b64decode(entry.text("picture"), validate=True)
        with Image.open(io.BytesIO(file), formats=("PNG", "JPEG")) as image:
            fits = image.width == image.height <= LARGEST_SIDE
            if fits:
                image.load()
    except (ValueError, OSError, SyntaxError, Image.DecompressionBombError) as error:
        raise entry.wrong("picture", "a PNG or JPEG file in base64") from error
    if not fits:
        raise entry.wrong("picture", f"a square image of at most {LARGEST_SIDE} × {LARGEST_SIDE} pixels")
    return file


def _answers(entry: Entry, classes: int) -> Tensor:
    """Probabilities [model, pose, class]."""
    answers = unpack(entry.entry("answers"), 2, len(POSES), classes)
    if answers.min() < 0 or (answers.sum(-1) - 1).abs().max() > TOLERANCE:
        raise entry.wrong("answers", "probabilities, which add up to 1")
    return answers


def _features(entry: Entry, copies: tuple[IrrepCopy, ...]) -> Iterator[Tensor]:
    """Maps [pose, component, H, W] of each copy."""
    entries = entry.entries("features", required=True)
    if len(entries) != len(copies):
        raise entry.wrong("features", f"those of {len(copies)} copies of irreps")
    for copy, packed in zip(copies, entries, strict=True):
        maps = unpack(packed, len(POSES), copy.irrep.dim, None, None)
        if maps.shape[-1] != maps.shape[-2]:
            raise packed.wrong("shape", "square maps")
        yield maps


def _filters(entry: Entry) -> dict[str, Tensor]:
    """Filters [n, in, P, P] by irrep and component; none of a model whose lift is free."""
    if not entry.values:
        return {}
    filters = {name: unpack(entry.entry(name), None, None, None, None) for name in FILTERS}
    for name, found in filters.items():
        if len(found) > COMPONENTS or found.shape[-1] != found.shape[-2]:
            raise entry.entry(name).wrong("shape", f"at most {COMPONENTS} square filters")
    return filters
