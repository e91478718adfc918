"""`quickvit embed` and `predict`: what a model makes of image files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from quickvit.cli.arguments import CHECKPOINT, MODEL
from quickvit.cli.build import choose_device, load_announced, require_vit
from quickvit.cli.command import Command
from quickvit.cli.output import print_json, print_table
from quickvit.data import find_images
from quickvit.evaluate import embed_images, predict_images
from quickvit.models import ViT
from quickvit.provenance import require_file


def embed(arguments: Namespace) -> int:
    """Write the features of image files and folders to an npz file."""
    require_file(arguments.out)
    model, images, options = _open(arguments)
    if arguments.pool == "token" and model.cls_token is None:
        raise ValueError(f"{arguments.model} has no class token; choose --pool avg")
    model.reset_classifier(0, arguments.pool)
    result = embed_images(model, images, **options)
    _require_some(result.paths, result.skipped)
    result.save(arguments.out)
    number, width = result.features.shape
    if arguments.json:
        print_json({"out": arguments.out, "images": number, "width": width, "skipped": result.skipped})
    else:
        print(f"wrote features of {number} images, width {width}, to {arguments.out}")
        print(f"skipped {len(result.skipped)} images")
    return 0


def predict(arguments: Namespace) -> int:
    """Name the classes of image files and folders, with the share of each in the softmax of the outputs."""
    if arguments.top < 1:
        raise ValueError(f"--top must be at least 1, got {arguments.top}")
    model, images, options = _open(arguments)
    result = predict_images(model, images, **options)
    _require_some(result.paths, result.skipped)
    answers = dict(zip(result.paths, result.best(arguments.top), strict=True))
    if arguments.json:
        print_json(
            {"answers": {path: dict(best) for path, best in answers.items()}, "skipped": result.skipped}
        )
        return 0
    print_table(
        ["image", *["class", "share"] * len(next(iter(answers.values())))],
        [
            [_printable(path), *(text for name, share in best for text in (_printable(name), f"{share:.1%}"))]
            for path, best in answers.items()
        ],
    )
    return 0


def _open(arguments: Namespace) -> tuple[ViT, list[Any], dict[str, Any]]:
    """The model and the images of a command line, and how the one is to be shown the others."""
    images = find_images(arguments.images)
    if not images:
        raise ValueError(f"no images in {', '.join(map(str, arguments.images))}")
    device = choose_device(arguments.device)
    model = require_vit(load_announced(arguments), arguments.model)
    return model, images, {"batch_size": arguments.batch_size, "device": device, "progress": True}


def _require_some(read: Sequence[str], skipped: Mapping[str, str]) -> None:
    for path, reason in skipped.items():
        print(f"quickvit: skipped {_printable(path)}: {_printable(reason)}", file=sys.stderr)
    if not read:
        raise ValueError(f"none of the {len(skipped)} images could be read")


def _printable(name: str) -> str:
    """Names of classes and of files must not give orders to a terminal, and those of files need not be UTF-8."""
    return name if name.isprintable() else ascii(name)


def _add_images(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL)
    parser.add_argument("images", nargs="+", help="image files and folders")
    parser.add_argument("--checkpoint", help=CHECKPOINT)
    parser.add_argument("--batch-size", type=int, default=32, help="images per step")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _add_embed(parser: ArgumentParser) -> None:
    _add_images(parser)
    parser.add_argument("--out", required=True, help="npz file to write")
    parser.add_argument("--pool", choices=["token", "avg"], help="the model's own by default")


def _add_predict(parser: ArgumentParser) -> None:
    _add_images(parser)
    parser.add_argument("--top", type=int, default=1, help="how many classes to name, best first")


COMMANDS = {"embed": Command(embed, _add_embed), "predict": Command(predict, _add_predict)}
