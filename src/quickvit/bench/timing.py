"""Clocks, and competitors that are timed in turns."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from statistics import median, quantiles
from typing import Any, TypeVar

import torch
from torch import nn
from tqdm import tqdm

from quickvit.bench.work import Ceilings, Work
from quickvit.train.compiling import Compile, compile_module, has_graphs

COMPILE: tuple[Compile, ...] = ("none", "default", "reduce-overhead", "blocks")

T = TypeVar("T")
Job = Callable[[], object]
# Milliseconds per call, over so many calls.
Clock = Callable[[Job, int], float]

# A sample is this long, so that the launch of its first call does not count.
SAMPLE_MS = 50.0
MAX_CALLS = 100
# On a GPU at least so many calls, however long: its clock follows the load, also that of the job before.
MIN_CALLS = 5
CEILING_REPEATS = 5


@dataclass(frozen=True)
class Settings:
    """What all competitors of a run share."""

    device: torch.device
    dtype: torch.dtype
    batch: int
    compile: Compile = "none"
    repeats: int = 5

    def __post_init__(self) -> None:
        for name in ("batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.compile not in COMPILE:
            raise ValueError(f"compile must be one of {', '.join(COMPILE)}; got {self.compile!r}")

    @property
    def cuda(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def clock(self) -> Clock:
        """Device events on a GPU, the processor's clock elsewhere."""
        return cuda_clock if self.cuda else cpu_clock

    @property
    def warm_up(self) -> int:
        """Calls before the clock runs; on a GPU the first compiles and the second records a CUDA graph."""
        return 3 if self.cuda else 1

    def compiled(self, module: nn.Module) -> nn.Module:
        """The module, compiled where it is as the settings say: without breaks in the graph, for these shapes."""
        compile_module(module, self.compile, fullgraph=True, dynamic=False)
        return module

    def begin_step(self) -> None:
        """Allow CUDA graphs to overwrite the outputs of the step before."""
        if has_graphs(self.compile):
            torch.compiler.cudagraph_mark_step_begin()


@dataclass(frozen=True)
class Timing:
    """Milliseconds of a call: median, distance of the quartiles relative to it, and the best.

    spread: None for a single sample, which has none.
    """

    ms: float
    spread: float | None
    best: float


@dataclass(frozen=True)
class Failure:
    """Why there is no number."""

    reason: str


@dataclass(frozen=True)
class Case:
    """A competitor: how to build its job, the work that one call must do, and how many images it takes."""

    name: str
    build: Callable[[], Job]
    work: Sequence[Work] = field(repr=False)
    images: int | None = None
    # Calls that the job makes, as one that replays a CUDA graph of many.
    calls: int = 1


# ---------------------------------------------------------------------- clocks


def cpu_clock(job: Job, calls: int) -> float:
    """Milliseconds per call by the processor's clock."""
    start = time.perf_counter()
    for _ in range(calls):
        job()
    return (time.perf_counter() - start) * 1e3 / calls


def cuda_clock(job: Job, calls: int) -> float:
    """Milliseconds per call by device events."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # One call that does not count keeps the device busy while the counted ones are queued.
    job()
    start.record()
    for _ in range(calls):
        job()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / calls


@contextmanager
def threads(number: int | None) -> Iterator[None]:
    """Within this context PyTorch uses so many threads on the CPU."""
    if number is not None and number < 1:
        raise ValueError(f"threads must be at least 1, got {number}")
    before = torch.get_num_threads()
    torch.set_num_threads(before if number is None else number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# ---------------------------------------------------------------------- measuring


def measure(
    cases: Sequence[Case], settings: Settings, label: str = "", clock: Clock | None = None
) -> dict[str, Timing | Failure]:
    """Times of the cases, in rounds A B C A B C …, so that a drift of the machine hits all of them.

    A case that fails drops out with its reason; the others go on.
    """
    total = len(cases) * (1 + settings.repeats)
    try:
        # Competitors share their code, of which PyTorch compiles a few variants only, a handful for each here.
        config: Any = torch.compiler.config
        limit = config.patch(recompile_limit=8 * len(cases))
        with limit, tqdm(total=total, desc=label, leave=False, disable=None) as progress:
            return _rounds(cases, settings, clock or settings.clock, progress.update)
    finally:
        release(settings)


def _rounds(
    cases: Sequence[Case], settings: Settings, clock: Clock, advance: Callable[[], object]
) -> dict[str, Timing | Failure]:
    samples: dict[str, list[float]] = {}
    failures: dict[str, Failure] = {}
    jobs: dict[str, tuple[Job, int]] = {}
    for case in cases:
        prepared = attempt(partial(_prepare, case, settings, clock))
        if isinstance(prepared, Failure):
            failures[case.name] = prepared
        else:
            jobs[case.name], samples[case.name] = prepared, []
        advance()
    for _ in range(settings.repeats):
        for case in cases:
            if case.name in jobs:
                sample = attempt(partial(clock, *jobs[case.name]))
                if isinstance(sample, Failure):
                    failures[case.name] = sample
                    del jobs[case.name], samples[case.name]
                else:
                    samples[case.name].append(sample / case.calls)
            advance()
    return {**failures, **{name: summary(times) for name, times in samples.items()}}


def _prepare(case: Case, settings: Settings, clock: Clock) -> tuple[Job, int]:
    """Build and warm up a job; also how many calls make a sample."""
    job = case.build()
    for _ in range(settings.warm_up):
        job()
    first = clock(job, 1)
    calls = math.ceil(SAMPLE_MS / max(first, 1e-6))
    return job, max(MIN_CALLS if settings.cuda else 1, min(MAX_CALLS, calls))


def summary(samples: Sequence[float]) -> Timing:
    """Median and spread of samples."""
    middle = median(samples)
    if len(samples) < 2 or not middle:
        return Timing(middle, None, min(samples))
    low, _, high = quantiles(samples, n=4, method="inclusive")
    return Timing(middle, (high - low) / middle, min(samples))


def attempt(function: Callable[[], T]) -> T | Failure:
    """The result of a function, or why it failed: out of memory, or an operator that the device lacks."""
    try:
        return function()
    except _failures() as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0][:200]}"
    # Outside the handler the traceback, and the tensors of its frames, are gone.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return Failure(reason)


def _failures() -> tuple[type[BaseException], ...]:
    errors: tuple[type[BaseException], ...] = (torch.cuda.OutOfMemoryError, RuntimeError)
    if find_spec("triton") is None:
        return errors
    from triton.errors import TritonError

    return (*errors, TritonError)


def release(settings: Settings) -> None:
    """Forget compiled code and give memory back, so that the next measurement starts afresh."""
    if settings.compile != "none":
        torch.compiler.reset()
    if settings.cuda:
        gc.collect()
        torch.cuda.empty_cache()


class GraphedCalls:
    """A job that replays a CUDA graph of many calls, so that gaps between launches do not count.

    The calls go round a list of jobs with tensors of their own, and their outputs do not share memory, so that
    no tensor is still in the cache when its turn comes.
    """

    def __init__(self, builders: Sequence[Callable[[], Job]], calls: int) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Built here, since a backward pass runs on the stream of its forward pass.
            self.jobs = [build() for build in builders]
            for job in self.jobs:
                for _ in range(3):
                    job()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=stream):
            self.outputs = [self.jobs[i % len(self.jobs)]() for i in range(calls)]

    def __call__(self) -> None:
        """Make all calls."""
        self.graph.replay()


# ---------------------------------------------------------------------- ceilings


def measure_ceilings(settings: Settings) -> Ceilings:
    """The best rates of a large copy (bytes read and written) and of a large matrix product, on random data."""
    size, side = (2**30, 8192) if settings.cuda else (2**26, 1024)

    def copy() -> Job:
        source = torch.randint(256, (size,), dtype=torch.uint8, device=settings.device)
        target = torch.empty_like(source)
        return lambda: target.copy_(source)

    def matmul() -> Job:
        a, b = (torch.randn(side, side, device=settings.device).to(settings.dtype) for _ in range(2))
        return lambda: a @ b

    settings = replace(settings, compile="none", repeats=max(CEILING_REPEATS, settings.repeats))
    outcomes = measure([Case("copy", copy, ()), Case("matmul", matmul, ())], settings, "ceilings")
    seconds = {}
    for name, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            raise ValueError(f"cannot measure the {name} rate of {settings.device}: {outcome.reason}")
        seconds[name] = outcome.best / 1e3
    return Ceilings(2 * size / seconds["copy"], 2 * side**3 / seconds["matmul"])
