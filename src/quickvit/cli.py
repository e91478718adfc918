"""The command `quickvit`: list, describe, verify and time models, embed images, run the demo."""

from __future__ import annotations

import difflib
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import timm
import torch
from jsonargparse import ArgumentParser, Namespace
from timm.models import is_model_in_modules
from timm.models.vision_transformer import VisionTransformer

from quickvit import __version__
from quickvit.bench import suite
from quickvit.bench.flops import BASELINE, Cost, Part, count, variants
from quickvit.bench.models import RECIPES
from quickvit.bench.record import write
from quickvit.bench.table import table
from quickvit.bench.timing import COMPILE
from quickvit.data import find_images
from quickvit.evaluate import embed_images, input_size, verify_symmetry
from quickvit.models import QuickVisionTransformer, convert_file
from quickvit.models.checkpoints import load_weights, read_checkpoint, restore
from quickvit.testing import randomize

ViT = QuickVisionTransformer | VisionTransformer

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}
# The modules of timm whose models are its VisionTransformer.
VIT_MODULES = ("vision_transformer", "deit")
# What makes a checkpoint a model of another name.
ARCHITECTURE = ("family", "embed_dim", "depth", "num_heads", "patch_size")
NOTHING = "–"


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0 good, 1 a check failed, 2 wrong arguments or files."""
    argv = sys.argv[1:] if argv is None else argv
    arguments = _parser().parse_args(argv)
    name = arguments.subcommand
    if name == "bench":
        arguments.bench.command = shlex.join(["quickvit", *argv])
    try:
        return COMMANDS[name](arguments[name])
    except BrokenPipeError:
        # Whoever reads the output has seen enough; what is still buffered must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"quickvit: error: {error}", file=sys.stderr)
        return 2


# ---------------------------------------------------------------------- commands


def models(arguments: Namespace) -> int:
    """List the variants with parameters and MACs, beside timm's ViT of the same sizes."""
    rows: list[dict[str, Any]] = []
    for variant in variants(arguments.family, arguments.size, arguments.patch):
        rows.append({"name": variant.name, **asdict(variant), **_numbers(variant.cost())})
    if arguments.json:
        _print_json(rows)
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
        _print_table(["name", "family", "invariant", "parameters (M)", "GMACs"], table)
    return 0


def info(arguments: Namespace) -> int:
    """Parameters and MACs of a model, part by part."""
    with torch.device("meta"):
        model = _build(arguments.model)
    description = {"name": arguments.model, **_describe(model)}
    cost = count(model)
    parts: list[dict[str, Any]] = [
        {"part": part.name, **_numbers(part)} for part in cost.parts if part.parameters
    ]
    if arguments.json:
        _print_json({**description, **_numbers(cost), "parts": parts})
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
    _print_table(["part", "parameters (M)", "GMACs", "GFLOPs"], table)
    return 0


def verify(arguments: Namespace) -> int:
    """Measure equivariance and invariance under the eight elements; exit code 1 if a promise is broken."""
    img_size = None if arguments.img_size is None else _parse_size(arguments.img_size)
    model = _build(arguments.model, arguments.checkpoint, img_size=img_size, turning=True)
    if arguments.checkpoint is None:
        randomize(model, arguments.seed)
    report = verify_symmetry(model, DTYPES[arguments.dtype], arguments.seed)
    if arguments.json:
        _print_json(
            {
                "name": arguments.model,
                "checkpoint": arguments.checkpoint,
                "img_size": input_size(model)[1:],
                "dtype": arguments.dtype,
                "tolerance": report.tolerance,
                "promises": report.promises,
                "broken": report.broken,
                "worst": report.worst,
                "elements": [asdict(errors) for errors in report.errors],
            }
        )
    else:
        table = [[e.element, _error(e.equivariance), _error(e.invariance)] for e in report.errors]
        table.append(["worst", *(_error(report.worst[kind]) for kind in ("equivariance", "invariance"))])
        _print_table(["element", "equivariance", "invariance"], table)
        verdict = f"broken: {', '.join(report.broken)}" if report.broken else "kept"
        print(
            f"\npromised in {arguments.dtype} within {report.tolerance:.0e}: "
            + (f"{' and '.join(report.promises)}; {verdict}" if report.promises else "nothing")
        )
    return 1 if report.broken else 0


def embed(arguments: Namespace) -> int:
    """Write the features of image files and folders to an npz file."""
    images = find_images(arguments.images)
    if not images:
        raise ValueError(f"no images in {', '.join(map(str, arguments.images))}")
    device = _device(arguments.device)
    model = _build(arguments.model, arguments.checkpoint)
    if arguments.checkpoint is None:
        print("quickvit: no --checkpoint given, the weights are random", file=sys.stderr)
    model.reset_classifier(0, arguments.pool)
    result = embed_images(model, images, batch_size=arguments.batch_size, device=device, progress=True)
    for path, reason in result.skipped.items():
        print(f"quickvit: skipped {path}: {reason}", file=sys.stderr)
    if not result.paths:
        print(f"quickvit: error: none of the {len(images)} images could be read", file=sys.stderr)
        return 1
    result.save(arguments.out)
    number, width = result.features.shape
    if arguments.json:
        _print_json({"out": arguments.out, "images": number, "width": width, "skipped": result.skipped})
    else:
        print(f"wrote features of {number} images, width {width}, to {arguments.out}")
        print(f"skipped {len(result.skipped)} images")
    return 0


def convert(arguments: Namespace) -> int:
    """Turn a checkpoint that the paper's authors released into one of ours."""
    convert_file(arguments.source, arguments.target, arguments.num_heads)
    _, config = read_checkpoint(arguments.target)
    if arguments.json:
        _print_json({"target": arguments.target, "config": config})
    else:
        print(f"wrote {arguments.target}")
    return 0


def demo(arguments: Namespace) -> int:
    """Train a small ViT, h8 and i8 on digits, and compare them."""
    from quickvit.demo import DemoConfig, format_table, run_demo

    given = {key: arguments[key] for key in ("seed", "epochs") if arguments[key] is not None}
    if arguments.out is not None:
        given["out"] = Path(arguments.out)
    config = DemoConfig(**given)
    try:
        result = run_demo(config)
    except ModuleNotFoundError as error:
        raise ValueError(error.msg) from error
    if arguments.json:
        _print_json(result)
    else:
        print(f"{format_table(result)}\n\npicture and numbers: {config.out}")
    return 0


def bench(arguments: Namespace) -> int:
    """Measure ours and timm's ViT of the same size side by side: time, memory, floors."""
    name = arguments.subcommand
    options = arguments[name].as_dict()
    given = {REQUEST.get(key, key): value for key, value in options.items() if key not in ("json", "out")}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    request = suite.Request(**{**given, "device": _device(options.get("device"))})
    record = suite.run(name, request, arguments.command)
    if options["out"] is not None:
        write(record.as_dict(), options["out"])
    if options["json"]:
        _print_json(record.as_dict())
    else:
        header, cells = table(record.rows, suite.BENCHMARKS[name].columns)
        _print_table(header, [[NOTHING if cell is None else cell for cell in row] for row in cells])
        for dtype, reached in record.ceilings.items():
            rates = f"{reached.bytes_per_s / 1e9:.4g} GB/s, {reached.flops_per_s / 1e12:.3g} TFLOP/s"
            print(f"\nceilings in {dtype}: copy and matrix product reach {rates}")
    return 1 if record.rows and all(row.failure for row in record.rows) else 0


COMMANDS: dict[str, Callable[[Namespace], int]] = {
    "models": models,
    "info": info,
    "verify": verify,
    "embed": embed,
    "convert": convert,
    "bench": bench,
    "demo": demo,
}


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="quickvit", description=__doc__, version=__version__)
    parsers = {name: ArgumentParser(description=command.__doc__) for name, command in COMMANDS.items()}

    add = parsers["models"].add_argument
    add("--family", help="d8, i8, h8, h2, or vit for the baselines")
    add("--size", help="tiny, small, base, large, huge, giant, e or 22b")
    add("--patch", type=int, help="14 or 16")

    add = parsers["info"].add_argument
    add("model", help="name of a model")

    add = parsers["verify"].add_argument
    add("model", help="name of a model")
    add("--checkpoint", help="weights, random ones by default")
    add("--img-size", help="H or HxW, the model's own by default")
    add("--dtype", choices=list(DTYPES), default="float32", help="precision of the check")
    add("--seed", type=int, default=0, help="of images and random weights")

    add = parsers["embed"].add_argument
    add("model", help="name of a model")
    add("images", nargs="+", help="image files and folders")
    add("--out", required=True, help="npz file to write")
    add("--checkpoint", help="weights, random ones by default")
    add("--batch-size", type=int, default=32, help="images per step")
    add("--device", help="cuda where there is one, else cpu")
    add("--pool", choices=["token", "avg"], help="the model's own by default")

    add = parsers["convert"].add_argument
    add("source", help="a file of davnords/octic-vits, DeiT III or DINOv2, h8 or i8")
    add("target", help="safetensors file to write")
    add("--num-heads", type=int, help="of a model whose width is not a published one")

    add = parsers["demo"].add_argument
    add("--out", help="folder for the results")
    add("--seed", type=int, help="of data, weights and order")
    add("--epochs", type=int, help="length of training")

    subcommands = parser.add_subcommands()
    for name, command in COMMANDS.items():
        if name != "bench":
            parsers[name].add_argument("--json", action="store_true", help="print JSON")
        subcommands.add_subcommand(name, parsers[name], help=command.__doc__)
    _add_benchmarks(parsers["bench"])
    return parser


SIZED = ("block", "model", "train", "memory", "ops")
WHOLE = ("model", "train", "memory")
LAYERS = ("linear", "gelu", "flops")
MEASURED = tuple(name for name in suite.BENCHMARKS if name != "flops")
# Options of the benchmarks, and which have them.
BENCH_OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "--sizes": (SIZED, {"nargs": "+", "help": "tiny … 22b; base on a CPU, large and huge on a GPU"}),
    "--patch": (SIZED, {"type": int, "help": "16 up to large, else 14"}),
    "--img-size": (SIZED, {"type": int, "default": 224, "help": "side of the images"}),
    "--depth": (WHOLE, {"type": int, "help": "fewer blocks"}),
    "--families": (("block", *WHOLE), {"nargs": "+", "help": "d8, h8, i8, h2, beside timm's ViT"}),
    "--recipe": (("train",), {"choices": list(RECIPES), "default": RECIPES[0], "help": "whose crops"}),
    "--views": (
        ("model",),
        {"type": bool, "default": True, "help": "compare with a ViT averaged over eight views"},
    ),
    "--widths": (LAYERS, {"nargs": "+", "type": int, "help": "numbers of channels"}),
    "--tokens": (LAYERS, {"type": int, "help": "of an image; 196, in flops 197"}),
    "--batch": (MEASURED, {"type": int, "help": "images; 8 on a CPU, 64 on a GPU, in gelu 32"}),
    "--dtype": (MEASURED, {"nargs": "+", "choices": list(suite.DTYPES), "help": "one or several"}),
    "--compile": (
        ("block", *WHOLE, "gelu"),
        {"choices": list(COMPILE), "help": "none on a CPU, else default"},
    ),
    "--device": (MEASURED, {"help": "cuda where there is one, else cpu"}),
    "--threads": (MEASURED, {"type": int, "help": "of PyTorch on the CPU"}),
    "--repeats": (MEASURED, {"type": int, "help": "rounds; 5 on a CPU, 20 on a GPU"}),
}
# Options with another name in `suite.Request`.
REQUEST = {"dtype": "dtypes"}


def _add_benchmarks(parser: ArgumentParser) -> None:
    subcommands = parser.add_subcommands()
    for name, benchmark in suite.BENCHMARKS.items():
        inner = ArgumentParser(description=benchmark.run.__doc__)
        for option, (names, settings) in BENCH_OPTIONS.items():
            if name in names:
                inner.add_argument(option, **settings)
        inner.add_argument("--json", action="store_true", help="print JSON")
        inner.add_argument("--out", help="JSON file to write, with hardware and versions")
        subcommands.add_subcommand(name, inner, help=benchmark.run.__doc__)


# ---------------------------------------------------------------------- models


def _build(
    name: str,
    checkpoint: str | None = None,
    *,
    img_size: tuple[int, int] | None = None,
    turning: bool = False,
) -> ViT:
    """The model of this name, with a checkpoint's weights; `turning` lets it take images turned by 90°."""
    state, config = (None, None) if checkpoint is None else read_checkpoint(checkpoint)
    if state is not None and config is not None:
        _check_same(name, config, checkpoint)
        model: ViT = restore(config, state, str(checkpoint))
    else:
        # timm's ViT takes images of a size other than its own, turned ones too, only if told so at the start.
        model = _create(name, **{} if name.startswith("quickvit_") else {"dynamic_img_size": turning})
        if state is not None:
            load_weights(model, state, source=str(checkpoint))
    if img_size is not None:
        patch = (
            model.patch_size if isinstance(model, QuickVisionTransformer) else model.patch_embed.patch_size[0]
        )
        if any(side < patch or side % patch for side in img_size):
            raise ValueError(
                f"an image of {img_size[0]}×{img_size[1]} pixels has no whole patches of {patch}"
            )
        model.set_input_size(img_size)
    return model


def _create(name: str, **options: Any) -> ViT:
    """A registered Quick ViT, a baseline of `quickvit models`, or a ViT of timm."""
    baselines = {variant.name: variant for variant in variants(BASELINE)}
    if name in baselines:
        model = baselines[name].create(**options)
    elif not timm.is_model(name):
        known = [*timm.list_models("quickvit*"), *baselines, *timm.list_models("vit*")]
        close = difflib.get_close_matches(name, known, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "`quickvit models` lists the names"
        raise ValueError(f"unknown model {name!r}; {hint}")
    elif name.startswith("quickvit_") or is_model_in_modules(name, VIT_MODULES):
        model = timm.create_model(name, **options)
    else:
        raise ValueError(f"{name} is neither a Quick ViT nor a ViT of timm")
    assert isinstance(model, ViT)
    return model


def _check_same(name: str, config: dict[str, Any], checkpoint: str | None) -> None:
    """Refuse a checkpoint of another architecture than the name says."""
    with torch.device("meta"):
        expected = getattr(_create(name), "config", {})
    differing = [key for key in ARCHITECTURE if config.get(key) != expected.get(key)]
    if differing:
        found = ", ".join(f"{key} {config.get(key)} instead of {expected.get(key)}" for key in differing)
        raise ValueError(f"{checkpoint} is not a {name}: {found}")


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


# ---------------------------------------------------------------------- words and numbers


def _parse_size(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if match is None:
        raise ValueError(f"an image size is H or HxW, got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def _device(name: str | None) -> torch.device:
    """The device of this name; by default CUDA where there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use the device {name!r}: {str(error).splitlines()[0]}") from error
    return device


def _numbers(cost: Cost | Part) -> dict[str, float]:
    return {"parameters": cost.parameters, "gmacs": cost.macs / 1e9, "gflops": cost.flops / 1e9}


def _error(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1e}"


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, default=str))


def _print_table(header: list[str], rows: list[list[str]]) -> None:
    """Columns padded to equal width, those of numbers to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(cell == NOTHING or cell[:1].isdigit() for cell in column[1:]) for column in columns]
    for row in (header, ["-" * width for width in widths], *rows):
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        print("  ".join(cells).rstrip())
