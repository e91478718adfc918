"""Whether data can keep up: images per second of a loader, of a model, and of the model fed by the loader."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import repeat

import torch
from tqdm import tqdm

from quickvit.bench.models import competitors, create_model, train_step
from quickvit.bench.table import Row, dtype_name
from quickvit.bench.timing import Failure, Settings, Timing, attempt, release, summary
from quickvit.bench.work import Shape
from quickvit.data import Batch, Mixing, Source, TrainLoader, deit3_transform
from quickvit.data.loader import AHEAD

# Samples are this long: workers deliver their batches in bursts.
SAMPLE_MS = 500.0
# DeiT III's, from which the batches come.
REPEATS = 3
Feed = Callable[[], Iterator[Batch]]


def bench_feeding(
    settings: Settings, shapes: Sequence[Shape], families: Sequence[str], source: Source, workers: int = 0
) -> list[Row]:
    """DeiT III's batches from a source: alone, and in forward and backward passes beside those on a single batch.

    One after the other, since workers would go on loading in somebody else's turn. The ratio is to the data alone.
    """
    rows = []
    for shape in shapes:
        loader = TrainLoader(
            source,
            deit3_transform(shape.img_size),
            batch_size=settings.batch,
            repeats=REPEATS,
            mixing=Mixing(len(source.classes)),
            workers=workers,
            device=settings.device,
        )
        fed: Feed = partial(loader.batches, 0, 10**9)
        kept: Feed = partial(repeat, next(loader.batches(0, 1)))
        jobs: dict[str, tuple[Feed, str | None]] = {"data": (fed, None)}
        for name in competitors(families):
            jobs |= {name: (kept, name), f"{name} with data": (fed, name)}
        outcomes = {}
        for label, (feed, name) in tqdm(jobs.items(), desc=shape.label, leave=False, disable=None):
            outcomes[label] = attempt(
                partial(_measure, feed, name, shape, len(source.classes), workers, settings)
            )
            release(settings)
        rows += _rows(f"{shape.label} {source.name}", outcomes, settings)
    return rows


def _measure(
    feed: Feed, name: str | None, shape: Shape, classes: int, workers: int, settings: Settings
) -> Timing:
    """The time of a batch, in the steady state."""
    step: Callable[..., None] | None = None
    if name is not None:
        step = train_step(create_model(name, shape, settings, num_classes=classes).train(), settings)
    batches = feed()

    def take(number: int) -> float:
        """Milliseconds for so many batches."""
        start = time.perf_counter()
        for _ in range(number):
            batch = next(batches)
            if step is not None:
                step(batch.images, batch.targets)
        if settings.cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1e3

    # What workers have ready at the start must not count.
    take(settings.warm_up + workers * AHEAD)
    turn = max(workers, 1)
    number = turn * max(1, math.ceil(SAMPLE_MS / take(turn)))
    return summary([take(number) / number for _ in range(settings.repeats)])


def _rows(case: str, outcomes: dict[str, Timing | Failure], settings: Settings) -> list[Row]:
    first = next(iter(outcomes.values()))
    rows = []
    for name, outcome in outcomes.items():
        if isinstance(outcome, Failure):
            rows.append(Row(case, name, dtype_name(settings), failure=outcome.reason))
            continue
        rows.append(
            Row(
                case,
                name,
                dtype_name(settings),
                ms=outcome.ms,
                spread=outcome.spread,
                images_per_s=settings.batch / outcome.ms * 1e3,
                ratio=first.ms / outcome.ms if isinstance(first, Timing) else None,
            )
        )
    return rows
