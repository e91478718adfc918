"""Every benchmark by its name: what it may be asked, and the record that it returns."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch

from quickvit.bench.dinov2 import bench_dinov2
from quickvit.bench.feeding import bench_feeding
from quickvit.bench.layers import bench_gelu, bench_linear, checked_width, count_flops, positive
from quickvit.bench.models import (
    bench_blocks,
    bench_memory,
    bench_models,
    bench_training,
    competitors,
    fused_attention,
)
from quickvit.bench.operators import bench_operators
from quickvit.bench.table import SPEED, Row
from quickvit.bench.timing import Settings, measure_ceilings, threads
from quickvit.bench.work import Ceilings, Shape
from quickvit.data import Source, cache, open_source
from quickvit.group import D8, DihedralGroup
from quickvit.provenance import surroundings
from quickvit.train.compiling import Compile

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
RECIPES = ("deit3", "dinov2")
LINEAR_WIDTHS = (1024, 8192)
# Sizes that the literature uses with patches of 16 pixels; the larger ones have 14.
COARSE = ("tiny", "small", "base", "large")


@dataclass(frozen=True)
class Request:
    """What to measure; None stands for a default that depends on the benchmark and the device."""

    device: torch.device
    sizes: tuple[str, ...] | None = None
    patch: int | None = None
    img_size: int = 224
    depth: int | None = None
    families: tuple[str, ...] | None = None
    widths: tuple[int, ...] | None = None
    groups: tuple[int, ...] = (D8.order,)
    tokens: int | None = None
    batch: int | None = None
    dtypes: tuple[str, ...] | None = None
    compile: Compile | None = None
    recipe: str = RECIPES[0]
    drop_path: float | None = None
    drop_path_subset: bool | None = None
    separate: bool | None = None
    data: str | None = None
    workers: int = 0
    cache: bool = False
    views: bool = True
    folded: bool = False
    threads: int | None = None
    repeats: int | None = None

    def __post_init__(self) -> None:
        if self.recipe not in RECIPES:
            raise ValueError(f"unknown recipe {self.recipe!r}; expected one of {', '.join(RECIPES)}")
        if self.recipe != "dinov2" and self.of_dinov2:
            options = [f"--{name.replace('_', '-')}" for name in self.of_dinov2]
            verb = "is" if len(options) == 1 else "are"
            raise ValueError(f"{' and '.join(options)} {verb} for dinov2, not for {self.recipe}")
        if self.drop_path is not None and not 0 <= self.drop_path < 1:
            raise ValueError(f"--drop-path must be at least 0 and less than 1, got {self.drop_path:g}")
        if self.workers < 0:
            raise ValueError(f"--workers must be at least 0, got {self.workers}")
        if self.data is None and (self.workers or self.cache):
            raise ValueError("--workers and --cache are about data; name it with --data")
        if self.data is not None and self.recipe != RECIPES[0]:
            raise ValueError(f"data comes as in {RECIPES[0]}, not as in {self.recipe}; leave one of them out")
        competitors(self.families or ())
        positive("tokens", _or(self.tokens, 1))
        groups = [DihedralGroup(order) for order in self.groups]
        for width in self.widths or LINEAR_WIDTHS:
            checked_width(width, *groups)

    @property
    def of_dinov2(self) -> dict[str, Any]:
        """What was asked for that only dinov2 has."""
        chosen = {name: getattr(self, name) for name in ("drop_path", "drop_path_subset", "separate")}
        return {name: value for name, value in chosen.items() if value is not None}

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @cached_property
    def source(self) -> Source | None:
        """The data, if there is any."""
        return None if self.data is None else open_source(self.data)

    def check_batch(self, batch: int) -> None:
        """Refuse a batch that the data or the recipe of training cannot have."""
        if self.source is not None and batch > len(self.source):
            number, name = len(self.source), self.source.name
            raise ValueError(f"--batch must be at most the {number} images of {name}, got {batch}")
        if self.recipe == "dinov2" and batch % 2:
            raise ValueError(f"--batch must be even for dinov2, whose KoLeo compares images, got {batch}")

    def shapes(self) -> list[Shape]:
        """The sizes with their patches."""
        sizes = self.sizes or (("large", "huge") if self.cuda else ("base",))
        return [
            Shape(size, self.patch or (16 if size in COARSE else 14), self.img_size, self.depth)
            for size in sizes
        ]

    def settings(self, dtype: str, benchmark: Benchmark) -> Settings:
        """What the competitors share."""
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
        return Settings(
            device=self.device,
            dtype=DTYPES[dtype],
            batch=self.batch if self.batch is not None else benchmark.batch if self.cuda else 8,
            compile=self.compile or (benchmark.compile if self.cuda else "none"),
            repeats=self.repeats if self.repeats is not None else 20 if self.cuda else 5,
        )


@dataclass(frozen=True)
class Benchmark:
    """A benchmark: its function, its columns and its defaults on a GPU."""

    run: Callable[[Settings, Ceilings, Request], list[Row]]
    columns: tuple[str, ...] = SPEED
    batch: int = 64
    dtypes: tuple[str, ...] = ("bfloat16",)
    # Whether the time of its rows needs a floor.
    ceilings: bool = True
    compile: Compile = "reduce-overhead"


def _model(settings: Settings, ceilings: Ceilings, request: Request) -> list[Row]:
    """Forward passes of whole models, timm's ViT beside ours."""
    families = request.families or ("d8", "h8", "i8")
    chosen = {"views": request.views, "folded": request.folded}
    return bench_models(settings, ceilings, request.shapes(), families, **chosen)


def _train(settings: Settings, ceilings: Ceilings, request: Request) -> list[Row]:
    """Training steps of whole models; below float32 with autocast. With data, also fed by a loader."""
    families = request.families or ("d8", "h8", "i8")
    if request.source is not None:
        source = cache(request.source) if request.cache else request.source
        return bench_feeding(settings, request.shapes(), families, source, request.workers)
    if request.recipe == "dinov2":
        return bench_dinov2(settings, ceilings, request.shapes(), families, **request.of_dinov2)
    return bench_training(settings, ceilings, request.shapes(), families)


def _block(settings: Settings, ceilings: Ceilings, request: Request) -> list[Row]:
    """One transformer block, forward and forward + backward."""
    families = request.families or ("d8",)
    return bench_blocks(settings, ceilings, request.shapes(), families, folded=request.folded)


def _memory(settings: Settings, _: Ceilings, request: Request) -> list[Row]:
    """Peak memory of inference, each model alone on the device."""
    families = request.families or ("d8", "h8", "i8")
    return bench_memory(settings, request.shapes(), families, folded=request.folded)


def _linear(settings: Settings, ceilings: Ceilings, request: Request) -> list[Row]:
    """Linear layers C → 4C: standard, octic or of other dihedral groups, and eight equal blocks."""
    widths = request.widths or (LINEAR_WIDTHS if request.cuda else LINEAR_WIDTHS[:1])
    groups = [DihedralGroup(order) for order in dict.fromkeys(request.groups)]
    return bench_linear(settings, ceilings, widths, tokens=_or(request.tokens, 196), groups=groups)


def _gelu(settings: Settings, ceilings: Ceilings, request: Request) -> list[Row]:
    """GELU and MLP against the width, standard and octic, and a copy of the same bytes."""
    widths = request.widths or (256, 512, 1024, 2048)
    return bench_gelu(settings, ceilings, widths, tokens=_or(request.tokens, 196))


def _operators(settings: Settings, ceilings: Ceilings, request: Request) -> list[Row]:
    """Each operator of an octic block against its floor."""
    return bench_operators(settings, ceilings, request.shapes())


def _flops(_: Settings, __: Ceilings, request: Request) -> list[Row]:
    """FLOPs of the matrix products in a block against the width, by formula; nothing is timed."""
    return count_flops(request.widths or tuple(2**i for i in range(7, 14)), tokens=_or(request.tokens, 197))


MODEL = (*SPEED, "memory_mib", "memory_ratio")
LAYER = ("case", "name", "dtype", "ms", "ratio", "floor_ms", "over_floor")
LINEAR = ("case", "name", "dtype", "intensity", "ms", "tflops_per_s", "ratio", "floor_ms", "over_floor")
MEMORY = ("case", "name", "dtype", "memory_mib", "memory_ratio")
PRECISIONS = ("float16", "bfloat16", "float32")
BENCHMARKS = {
    "block": Benchmark(_block),
    "model": Benchmark(_model, MODEL),
    "train": Benchmark(_train),
    "linear": Benchmark(_linear, LINEAR, dtypes=PRECISIONS, compile="none"),
    "gelu": Benchmark(_gelu, LAYER, batch=32, compile="default"),
    "memory": Benchmark(_memory, MEMORY, ceilings=False, compile="none"),
    "ops": Benchmark(_operators, LAYER, compile="none"),
    "flops": Benchmark(_flops, ("case", "name", "gflops", "ratio"), ceilings=False, compile="none"),
}
"""The benchmarks by their names, as in `quickvit bench NAME`."""


@dataclass(frozen=True)
class Record:
    """The rows of a run, and all that is needed to judge them."""

    benchmark: str
    settings: dict[str, Any]
    ceilings: dict[str, Ceilings]
    rows: list[Row]
    surroundings: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "benchmark": self.benchmark,
            "settings": self.settings,
            "ceilings": {dtype: asdict(c) for dtype, c in self.ceilings.items()},
            "results": [asdict(row) for row in self.rows],
            **self.surroundings,
        }


def run(name: str, request: Request, command: str = "") -> Record:
    """Run a benchmark once per dtype."""
    if name not in BENCHMARKS:
        raise ValueError(f"unknown benchmark {name!r}; expected one of {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    dtypes = request.dtypes or (benchmark.dtypes if request.cuda else ("float32",))
    # Everything that can be wrong with the arguments is said before anything takes time.
    chosen = {dtype: request.settings(dtype, benchmark) for dtype in dtypes}
    request.shapes()
    if name == "train":
        request.check_batch(chosen[dtypes[0]].batch)
    rows: list[Row] = []
    ceilings: dict[str, Ceilings] = {}
    on_device = torch.cuda.device(request.device) if request.cuda else nullcontext()
    with threads(request.threads), on_device, fused_attention():
        for dtype, settings in chosen.items():
            reached = Ceilings(1.0, 1.0)
            # Of models that are fed by data no floor is known.
            if benchmark.ceilings and request.data is None:
                reached = ceilings[dtype] = measure_ceilings(settings)
            rows += benchmark.run(settings, reached, request)
        around = surroundings(request.device, command)
    first = chosen[dtypes[0]]
    shared = {key: getattr(first, key) for key in ("batch", "compile", "repeats")}
    return Record(name, {**shared, "dtypes": list(dtypes)}, ceilings, rows, around)


def _or(value: int | None, default: int) -> int:
    return default if value is None else value
