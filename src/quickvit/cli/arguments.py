"""Arguments that several commands take."""

from __future__ import annotations

import torch
from jsonargparse import ArgumentParser

# Precisions of a trained model; bfloat16 stands for autocast.
PRECISIONS = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def add_evaluation(parser: ArgumentParser) -> None:
    """A trained model, data, and how to run the one on the other."""
    parser.add_argument("checkpoint", help="safetensors file, or the folder of a run")
    parser.add_argument("--model", help="name of the model, for a checkpoint that does not say")
    parser.add_argument("--data", default="digits", help="a folder, digits, wds/…, torch/… or hfds/…")
    parser.add_argument("--split", default="val", help="train, val, test or all")
    parser.add_argument("--batch-size", type=int, default=64, help="images per step and process")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images, for each process")
    parser.add_argument("--dtype", choices=list(PRECISIONS), default="float32", help="bfloat16 for autocast")
    parser.add_argument("--device", help="cuda where there is one, else cpu")
    parser.add_argument("--json", action="store_true", help="print JSON")
