"""`quickvit bench`: time and memory beside timm's ViT. `quickvit tune`: faster kernels for this GPU."""

from __future__ import annotations

import sys
from typing import Any

from jsonargparse import ArgumentParser, Namespace

from quickvit.bench import suite
from quickvit.bench.table import table
from quickvit.bench.timing import COMPILE, measure_ceilings
from quickvit.bench.tune import Tuned, require_gpu
from quickvit.bench.tune import tune as search_tiles
from quickvit.cli.build import choose_device
from quickvit.cli.command import Command, Parser
from quickvit.cli.output import NOTHING, print_json, print_table
from quickvit.ops.tiles import path as tiles_path
from quickvit.ops.tiles import store
from quickvit.provenance import require_file, write

SIZED = ("block", "model", "train", "memory", "ops")
WHOLE = ("model", "train", "memory")
LAYERS = ("linear", "gelu", "flops")
MEASURED = tuple(name for name in suite.BENCHMARKS if name != "flops")
# Options of the benchmarks, and which have them.
BENCH_OPTIONS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "--sizes": (SIZED, {"nargs": "+", "help": "tiny … 22b; base on a CPU, large and huge on a GPU"}),
    "--patch": (SIZED, {"type": int, "help": "16 up to large, else 14"}),
    "--img-size": (SIZED, {"type": int, "default": 224, "help": "side of the images"}),
    "--depth": (WHOLE, {"type": int, "help": "number of blocks, to time a shortened model"}),
    "--families": (("block", *WHOLE), {"nargs": "+", "help": "d8, h8, i8, h2, beside timm's ViT"}),
    "--recipe": (
        ("train",),
        {"choices": list(suite.RECIPES), "default": suite.RECIPES[0], "help": "whose steps"},
    ),
    "--drop-path": (("train",), {"type": float, "help": "stochastic depth of dinov2, 0.3 by default"}),
    "--drop-path-subset": (
        ("train",),
        {
            "type": bool,
            "help": "whether dinov2 leaves samples out of the computation; as in training by default",
        },
    ),
    "--separate": (
        ("train",),
        {"type": bool, "help": "time dinov2 also with a pass for each size of crops, true by default"},
    ),
    "--data": (("train",), {"help": "also the throughput with this data: a folder, digits, wds/…, torch/…"}),
    "--workers": (("train",), {"type": int, "default": 0, "help": "processes that read the data"}),
    "--cache": (("train",), {"type": bool, "default": False, "help": "keep the decoded images in memory"}),
    "--views": (
        ("model",),
        {
            "type": bool,
            "default": True,
            "help": "also time a ViT averaged over the eight poses, which is invariant too",
        },
    ),
    "--folded": (
        ("block", "model", "memory"),
        {"type": bool, "default": False, "help": "also measure inference with folded octic blocks"},
    ),
    "--widths": (LAYERS, {"nargs": "+", "type": int, "help": "numbers of channels"}),
    "--groups": (
        ("linear",),
        {"nargs": "+", "type": int, "default": [8], "help": "orders of dihedral groups; 8 is the octic one"},
    ),
    "--tokens": (LAYERS, {"type": int, "help": "of an image; 196 by default, in flops 197"}),
    "--batch": (
        MEASURED,
        {"type": int, "help": "images; by default 8 on a CPU, 64 on a GPU, there in gelu 32"},
    ),
    "--dtype": (MEASURED, {"nargs": "+", "choices": list(suite.DTYPES), "help": "precisions to time"}),
    "--compile": (
        ("block", *WHOLE, "gelu"),
        {
            "choices": list(COMPILE),
            "help": "mode of torch.compile; none on a CPU by default. reduce-overhead runs CUDA graphs, and so does "
            "blocks, which compiles deep models faster",
        },
    ),
    "--device": (MEASURED, {"help": "cuda where there is one, else cpu"}),
    "--threads": (MEASURED, {"type": int, "help": "of PyTorch on the CPU"}),
    "--repeats": (MEASURED, {"type": int, "help": "rounds; 5 on a CPU, 20 on a GPU"}),
}
# Options with another name in `suite.Request`.
REQUEST = {"dtype": "dtypes"}


def bench(arguments: Namespace) -> int:
    """Measure ours and timm's ViT of the same size side by side: time, memory, floors."""
    name = arguments.subcommand
    options = arguments[name].as_dict()
    given = {REQUEST.get(key, key): value for key, value in options.items() if key not in ("json", "out")}
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in given.items()}
    request = suite.Request(**{**given, "device": choose_device(options.get("device"))})
    if options["out"] is not None:
        require_file(options["out"])
    record = suite.run(name, request, arguments.command_line)
    if options["json"]:
        print_json(record.as_dict())
    else:
        header, cells = table(record.rows, suite.BENCHMARKS[name].columns)
        print_table(header, [[NOTHING if cell is None else cell for cell in row] for row in cells])
        for dtype, reached in record.ceilings.items():
            rates = f"{reached.bytes_per_s / 1e9:.4g} GB/s, {reached.flops_per_s / 1e12:.3g} TFLOP/s"
            print(f"\nceilings in {dtype}: copy and matrix product reach {rates}")
    # Last, so that a disk that is full does not take the numbers along.
    if options["out"] is not None:
        write(record.as_dict(), options["out"])
    return 1 if record.rows and all(row.failure for row in record.rows) else 0


def tune(arguments: Namespace) -> int:
    """Search for the tiles that the kernels run fastest with on this GPU, and keep them; takes minutes."""
    device = choose_device(arguments.device)
    gpu = require_gpu(device)
    request = suite.Request(
        sizes=tuple(arguments.sizes), device=device, batch=arguments.batch, dtypes=(arguments.dtype,)
    )
    settings = request.settings(arguments.dtype, suite.BENCHMARKS["ops"])
    shapes = request.shapes()
    found: list[Tuned] = []
    for result in search_tiles(settings, measure_ceilings(settings), shapes):
        found.append(result)
        # What was found survives an interruption.
        store(gpu, {result.kernel: result.after})
    if not found:
        print("quickvit: nothing to tune: no kernel with tiles runs on this GPU", file=sys.stderr)
        return 1
    rows = [[r.kernel, str(r.before), _ms(r.before_ms), str(r.after), _ms(r.after_ms)] for r in found]
    print_table(["kernel", "tile before", "ms", "tile now", "ms"], rows)
    print(f"\nkept in {tiles_path(gpu)}")
    return 0


def _ms(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.4f}"


def _add_tuning(parser: ArgumentParser) -> None:
    parser.add_argument("--sizes", nargs="+", default=["large", "huge"], help="tiny … 22b")
    parser.add_argument("--batch", type=int, default=64, help="images")
    parser.add_argument("--dtype", choices=list(suite.DTYPES), default="bfloat16")
    parser.add_argument("--device", help="cuda by default")


def _add_benchmarks(parser: ArgumentParser) -> None:
    subcommands = parser.add_subcommands()
    for name, benchmark in suite.BENCHMARKS.items():
        inner = Parser(description=benchmark.run.__doc__)
        for option, (names, settings) in BENCH_OPTIONS.items():
            if name in names:
                inner.add_argument(option, **settings)
        inner.add_argument("--json", action="store_true", help="print JSON")
        inner.add_argument("--out", help="JSON file to write, with hardware and versions")
        subcommands.add_subcommand(name, inner, help=benchmark.run.__doc__)


COMMANDS = {"bench": Command(bench, _add_benchmarks), "tune": Command(tune, _add_tuning)}
