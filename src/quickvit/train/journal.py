"""The journal of a run: metrics as JSON lines, progress in the terminal, other services if asked for."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, TextIO
from uuid import uuid4

from torch.profiler import profile
from tqdm import tqdm

logger = logging.getLogger(__name__)

METRICS = "metrics.jsonl"
EVALUATION = "eval/"
# Updates of a process that a profiler records: not the first, which do more.
PROFILED = range(8, 13)


class Journal:
    """What is noted of a run from update `start` on.

    folder: for `metrics.jsonl`; nothing is written without one. Lines of updates after `start`, which are about to
        be repeated, are dropped.
    images: of one update. label: of the progress bar, which shows the rate and the time left; none without one.
    evaluations: (updates, numbers) so far. seconds: spent on updates.
    """

    def __init__(
        self, folder: Path | None, start: int = 0, total: int = 0, images: int = 1, label: str | None = None
    ) -> None:
        self.folder, self.start, self.total, self.images, self.label = folder, start, total, images, label
        self.evaluations: list[tuple[int, dict[str, float]]] = []
        self.seconds = 0.0
        self._written = (start, 0.0)
        self._writers: list[Callable[[int, Mapping[str, float]], Any]] = []
        self._updaters: list[Callable[[], Any]] = []
        self._stack = ExitStack()

    def __enter__(self) -> Journal:
        self._bar = self._stack.enter_context(
            tqdm(
                total=self.total * self.images,
                initial=self.start * self.images,
                desc=self.label,
                unit="img",
                unit_scale=True,
                # A file is no terminal, and would be filled by what overwrites itself there.
                mininterval=0.1 if sys.stderr.isatty() else 10.0,
                disable=self.label is None,
            )
        )
        self._updaters.append(lambda: self._bar.update(self.images))
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            _keep_until(self.folder, self.start)
            file = self._stack.enter_context((self.folder / METRICS).open("a", encoding="utf-8"))
            self._writers.append(lambda step, metrics: _write_line(file, {"step": step, **metrics}))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @contextmanager
    def update(self) -> Iterator[None]:
        """An update happens inside."""
        began = time.perf_counter()
        yield
        self.seconds += time.perf_counter() - began
        for updater in self._updaters:
            updater()

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Note metrics after so many updates, and the rate of images since they were last noted."""
        steps, seconds = step - self._written[0], self.seconds - self._written[1]
        self._written = step, self.seconds
        self._note(step, {**metrics, "images_per_second": steps * self.images / seconds})

    def evaluation(self, step: int, numbers: dict[str, float]) -> None:
        """Note the numbers of an evaluation after so many updates."""
        self.evaluations.append((step, numbers))
        if not numbers:
            return
        self._note(step, {f"{EVALUATION}{name}": value for name, value in numbers.items()})
        self._bar.set_postfix({name: f"{value:.4g}" for name, value in numbers.items()})

    def _note(self, step: int, metrics: Mapping[str, float]) -> None:
        for writer in self._writers:
            writer(step, metrics)

    # ------------------------------------------------------------------ services

    def add_tensorboard(self) -> None:
        """Write metrics for TensorBoard too."""
        if self.folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("TensorBoard", "tensorboard") from error
        writer = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self.start or None)
        self._stack.callback(writer.close)

        def write(step: int, metrics: Mapping[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        self._writers.append(write)

    def add_wandb(self, project: str, config: dict[str, Any]) -> None:
        """Log metrics to Weights & Biases too: one run there for the run folder, however often it is resumed."""
        if self.folder is None:
            return
        try:
            import wandb
        except ImportError as error:
            raise _missing("Weights & Biases", "wandb") from error
        # Folders of one name may lie in several others.
        remembered = self.folder / "wandb-id"
        if not remembered.exists():
            remembered.write_text(uuid4().hex, encoding="utf-8")
        options = {"id": remembered.read_text(encoding="utf-8"), "resume": "allow", "dir": str(self.folder)}
        run = wandb.init(project=project, name=self.folder.resolve().name, config=config, **options)
        self._stack.callback(run.finish)
        self._writers.append(lambda step, metrics: run.log(dict(metrics), step=step))

    def add_profiler(self, path: Path) -> None:
        """Write a trace of a few updates, `PROFILED`, or of those of them that there are."""
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler, done = profile(acc_events=True), count(1)
        traced = ExitStack()

        def write() -> None:
            profiler.stop()
            profiler.export_chrome_trace(str(path))

        def advance() -> None:
            number = next(done)
            if number == PROFILED.start:
                profiler.start()
                traced.callback(write)
            elif number == PROFILED.stop:
                traced.close()

        def end() -> None:
            if next(done) <= PROFILED.start:
                logger.warning("no trace in %s: it begins after %d updates", path, PROFILED.start)
            traced.close()

        self._stack.callback(end)
        self._updaters.append(advance)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run folder, line by line, NaN for null; a last line that was cut off is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            break
        rows.append({name: math.nan if value is None else value for name, value in row.items()})
    return rows


def _keep_until(folder: Path, step: int) -> None:
    rows = [row for row in read_metrics(folder) if row["step"] <= step]
    temporary = folder / f".{METRICS}.tmp"
    with temporary.open("w", encoding="utf-8") as file:
        for row in rows:
            _write_line(file, row)
    os.replace(temporary, folder / METRICS)


def _write_line(file: TextIO, row: Mapping[str, Any]) -> None:
    # JSON has no word for what is not finite.
    known = {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    try:
        file.write(json.dumps(known, allow_nan=False) + "\n")
        file.flush()
    except OSError as error:
        # A full disk must not end a run for a line of metrics.
        logger.warning("cannot write metrics of step %d: %s", row["step"], error)


def _missing(name: str, extra: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f'{name} is not installed: pip install "quickvit[{extra}]"', name=extra)
