"""Arguments that several commands take."""

from __future__ import annotations

import torch
from jsonargparse import ArgumentParser

from quickvit.data.loader import MAX_UNREADABLE

# What `build.load_model` takes.
MODEL = "safetensors file, the folder of a run, or the name of a model"
CHECKPOINT = "checkpoint with the weights; random weights if not given"
# Precisions of a trained model; bfloat16 stands for autocast.
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_model(parser: ArgumentParser, dtype: str | None = "float32") -> None:
    """A trained model, and how to run it; `dtype` is the default."""
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--checkpoint", help="weights of a model that was named")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step and process")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images, for each process")
    precisions = "bfloat16 for autocast" + ("" if dtype else "; by default on a GPU")
    parser.add_argument("--dtype", choices=list(PRECISIONS), default=dtype, help=precisions)
    parser.add_argument(
        "--max-unreadable",
        type=float,
        default=MAX_UNREADABLE,
        help="images that may be unreadable: a number, or below 1 a fraction",
    )
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_data(parser: ArgumentParser) -> None:
    """What a model is shown."""
    parser.add_argument("--data", default="digits", help="a folder, digits, wds/…, torch/… or hfds/…")


def add_poses(parser: ArgumentParser) -> None:
    """How images are shown."""
    parser.add_argument("--circle", action="store_true", help="hide the corners, upright too")
    parser.add_argument("--seed", type=int, default=0, help="of random rotations")
