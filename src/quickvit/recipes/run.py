"""From a recipe to a run folder."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from quickvit.provenance import surroundings, write
from quickvit.recipes.config import as_plain
from quickvit.train import Outcome, Recipe, RunConfig, Trainer, World, connected

try:
    import fcntl
except ImportError:  # Windows has none.
    fcntl = None  # type: ignore[assignment]

logger = logging.getLogger(__name__)

CONFIG = "config.json"
STARTS = "starts.jsonl"
LOCK = ".lock"


class Config(Protocol):
    """What every recipe's configuration has: a folder for the run, and how it is carried out."""

    @property
    def out(self) -> Path:
        """The run folder."""
        ...

    @property
    def run(self) -> RunConfig:
        """How it is carried out."""
        ...


C = TypeVar("C", bound=Config)


def carry_out(
    config: C,
    resolve: Callable[[C, torch.device], C],
    build: Callable[[C], Recipe],
    command: str = "",
) -> Outcome:
    """Resolve a configuration, build its recipe and train it, alone or as one of several processes.

    The run folder gets the resolved configuration, which can be given back with --config, and a line for each
    start with the commit, versions and hardware.
    """
    with connected(config.run.device) as world:
        # In a function of its own, so that shared modules are gone before the connection is: with some releases of
        # PyTorch they would wait for its threads, and these for Python.
        return _train(resolve(config, world.device), build, world, command)


def _train(config: C, build: Callable[[C], Recipe], world: World, command: str) -> Outcome:
    def begins(done: int) -> None:
        if world.main:
            _note_start(config, world.device, command, done)

    trainer = Trainer(build(config), config.run, config.out, world)
    with _alone(config.out, world):
        outcome = trainer.fit(begins=begins)
    if world.main:
        end = "stopped, and ready to go on by the same command" if outcome.stopped else "done"
        logger.info("%s after %d updates in %s", end, outcome.steps, config.out)
    return outcome


@contextmanager
def _alone(folder: Path, world: World) -> Iterator[None]:
    """Hold a run folder: two runs in one would mix their checkpoints."""
    with ExitStack() as stack:
        held = True
        if world.main and fcntl is not None:
            folder.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context((folder / LOCK).open("a", encoding="utf-8"))
            try:
                # Not flock, whose locks the loader's processes inherit: they outlive one that was killed.
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                held = False
            except OSError as error:
                logger.warning("%s cannot be locked: %s; start no other run there", folder, error)
        if not all(world.gather(held)):
            raise ValueError(f"another process is training in {folder}: wait for it, or use another folder")
        yield


def _note_start(config: Config, device: torch.device, command: str, done: int) -> None:
    plain = as_plain(config)
    config.out.mkdir(parents=True, exist_ok=True)
    # A run that starts anew is not the one that an older file describes.
    if done == 0 or not (config.out / CONFIG).exists():
        write(plain, config.out / CONFIG)
    with (config.out / STARTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps({**surroundings(device, command), "config": plain}) + "\n")


def trained_by(path: str | Path) -> str | None:
    """The command that a run folder was last started with; None where nothing says it."""
    try:
        start = json.loads((Path(path) / STARTS).read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return None
    command = start.get("command") if isinstance(start, dict) else None
    return command if isinstance(command, str) else None
