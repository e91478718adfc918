"""Metrics of a run: JSON lines always, TensorBoard and Weights & Biases if asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO

METRICS = "metrics.jsonl"
Writer = Callable[[int, Mapping[str, float]], None]


class Log:
    """Writes metrics by step. The lines of steps after `start`, which are about to be repeated, are dropped.

    folder: nothing is written without one.
    """

    def __init__(
        self,
        folder: Path | None,
        start: int = 0,
        *,
        tensorboard: bool = False,
        wandb: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        self._file: TextIO | None = None
        self._writers: list[Writer] = []
        self._closers: list[Callable[[], Any]] = []
        if folder is None:
            return
        path = folder / METRICS
        _keep_until(path, start)
        self._file = path.open("a", encoding="utf-8")
        if tensorboard:
            self._add_tensorboard(folder, start)
        if wandb is not None:
            self._add_wandb(wandb, folder, config or {})

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics after `step` updates."""
        if self._file is not None:
            self._file.write(json.dumps({"step": step, **metrics}) + "\n")
            self._file.flush()
        for writer in self._writers:
            writer(step, metrics)

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        for close in self._closers:
            close()

    def _add_tensorboard(self, folder: Path, start: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise _missing("TensorBoard", "tensorboard") from error
        writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start or None)

        def write(step: int, metrics: Mapping[str, float]) -> None:
            for name, value in metrics.items():
                writer.add_scalar(name, value, step)

        self._writers.append(write)
        self._closers.append(writer.close)

    def _add_wandb(self, project: str, folder: Path, config: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise _missing("Weights & Biases", "wandb") from error
        # One run in the project for one run folder, however often it is resumed.
        name = folder.resolve().name
        run = wandb.init(
            project=project, name=name, id=name, resume="allow", dir=str(folder), config=dict(config)
        )
        self._writers.append(lambda step, metrics: run.log(dict(metrics), step=step))
        self._closers.append(run.finish)


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The metrics of a run folder, line by line; a last line that was cut off is left out."""
    path = folder / METRICS
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _keep_until(path: Path, step: int) -> None:
    rows = [row for row in read_metrics(path.parent) if row["step"] <= step]
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    os.replace(temporary, path)


def _missing(name: str, extra: str) -> ModuleNotFoundError:
    return ModuleNotFoundError(f'{name} is not installed: pip install "quickvit[{extra}]"', name=extra)
