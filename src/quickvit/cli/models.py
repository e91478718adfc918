"""`quickvit models`, `info` and `convert`: what models there are."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser, Namespace

from quickvit.bench.flops import BASELINE, Cost, Part, count, variants
from quickvit.cli.arguments import MODEL
from quickvit.cli.build import load_model, require_vit
from quickvit.cli.command import Command
from quickvit.cli.output import NOTHING, print_json, print_table
from quickvit.data import input_size
from quickvit.models import QuickVisionTransformer, ViT, convert_file, create_model
from quickvit.models.checkpoints import read_checkpoint


def models(arguments: Namespace) -> int:
    """List the variants with parameters and MACs, beside timm's ViT of the same sizes."""
    rows: list[dict[str, Any]] = []
    for variant in variants(arguments.family, arguments.size, arguments.patch):
        rows.append({"name": variant.name, **asdict(variant), **_numbers(variant.cost())})
    if arguments.json:
        print_json(rows)
    else:
        table = [
            [
                row["name"],
                row["family"],
                row["invariant"] or NOTHING,
                f"{row['parameters'] / 1e6:.1f}",
                f"{row['gmacs']:.1f}",
            ]
            for row in rows
        ]
        print_table(["name", "family", "invariant", "parameters (M)", "GMACs"], table)
    return 0


def _add_models(parser: ArgumentParser) -> None:
    parser.add_argument("--family", help="d8, i8, h8, h2, or vit for the baselines")
    parser.add_argument("--size", help="tiny, small, base, large, huge, giant, e or 22b")
    parser.add_argument("--patch", type=int, help="14 or 16")
    parser.add_argument("--json", action="store_true", help="print JSON")


def info(arguments: Namespace) -> int:
    """Parameters and MACs of a model, part by part."""
    if Path(arguments.model).exists():
        model = require_vit(load_model(arguments.model), arguments.model).to("meta")
    else:
        with torch.device("meta"):
            model = create_model(arguments.model)
    description = {"name": arguments.model, **_describe(model)}
    cost = count(model)
    parts: list[dict[str, Any]] = [
        {"part": part.name, **_numbers(part)} for part in cost.parts if part.parameters
    ]
    if arguments.json:
        print_json({**description, **_numbers(cost), "parts": parts})
        return 0
    for key, value in description.items():
        text = "×".join(map(str, value)) if isinstance(value, tuple) else value
        print(f"{key.replace('_', ' '):12} {NOTHING if text is None else text}")
    print()
    table = [
        [
            row["part"].replace("_", " "),
            f"{row['parameters'] / 1e6:.2f}",
            f"{row['gmacs']:.2f}",
            f"{row['gflops']:.2f}",
        ]
        for row in [*parts, {"part": "total", **_numbers(cost)}]
    ]
    print_table(["part", "parameters (M)", "GMACs", "GFLOPs"], table)
    return 0


def _add_info(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--json", action="store_true", help="print JSON")


def convert(arguments: Namespace) -> int:
    """Turn a checkpoint that the paper's authors released into one of ours."""
    convert_file(arguments.source, arguments.target, arguments.num_heads)
    _, config = read_checkpoint(arguments.target)
    if arguments.json:
        print_json({"target": arguments.target, "config": config})
    else:
        print(f"wrote {arguments.target}")
    return 0


def _add_convert(parser: ArgumentParser) -> None:
    parser.add_argument("source", help="a file of davnords/octic-vits, DeiT III or DINOv2, h8 or i8")
    parser.add_argument("target", help="safetensors file to write")
    parser.add_argument("--num-heads", type=int, help="of a model whose width is not a published one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _describe(model: ViT) -> dict[str, Any]:
    """The architecture of a model."""
    quick = model if isinstance(model, QuickVisionTransformer) else None
    return {
        "family": BASELINE if quick is None else quick.family,
        "group": None if quick is None else str(quick.group),
        "invariant": None if quick is None or quick.invariant is None else quick.config["invariant"],
        "img_size": input_size(model)[1:],
        "embed_dim": model.embed_dim,
        "depth": len(model.blocks),
        "octic_depth": 0 if quick is None else quick.octic_depth,
    }


def _numbers(cost: Cost | Part) -> dict[str, float]:
    return {"parameters": cost.parameters, "gmacs": cost.macs / 1e9, "gflops": cost.flops / 1e9}


COMMANDS = {
    "models": Command(models, _add_models),
    "info": Command(info, _add_info),
    "convert": Command(convert, _add_convert),
}
