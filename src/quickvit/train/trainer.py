"""The training loop, shared by all recipes.

Everything random is a function of (seed, step, rank) and every schedule of the step, so a run that was stopped at
any moment and resumed makes the same updates as one that was not.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import profile, schedule
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from quickvit.data import derived_seed
from quickvit.train.checkpoint import Store
from quickvit.train.distributed import Compile, Parallel, World, bare, gradients_shared, spread, trained
from quickvit.train.log import Log
from quickvit.train.norms import clip_
from quickvit.train.optimizers import set_schedules
from quickvit.train.recipe import Recipe
from quickvit.train.signals import StopRequest, stop_requests

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
CAPTURED = "captured"


@dataclass(frozen=True)
class RunConfig:
    """How a run is carried out. Nothing here decides what it computes, so all of it may change on resuming."""

    device: str | None = None
    """A GPU for each process where there are any, else the CPU."""
    parallel: Parallel = "ddp"
    """With several processes: ddp replicates the weights, fsdp shards them (FSDP2), for models that need it."""
    compile: Compile = "none"
    """torch.compile's mode; reduce-overhead is the fastest for Quick ViTs on a GPU."""
    accumulate: int = 1
    """Backward passes per update, each over a part of the batch, where a batch does not fit into memory."""
    workers: int = 4
    """Processes that load data, for each rank."""
    save_every: int | None = None
    """Updates between checkpoints; an epoch by default."""
    keep: int = 3
    """Checkpoints kept, the newest."""
    evaluate_every: int | None = None
    """Updates between evaluations; an epoch by default. The last update is always evaluated."""
    log_every: int = 50
    """Updates between lines of metrics."""
    max_nonfinite: int = 0
    """Updates with a loss or gradient that is not finite to leave out before giving up."""
    tensorboard: bool = False
    """Write metrics for TensorBoard too."""
    wandb: str | None = None
    """Project of Weights & Biases to log to."""
    profile: bool = False
    """Write a trace of a few updates to RUN/profile, for Perfetto or chrome://tracing."""

    def __post_init__(self) -> None:
        for name in ("accumulate", "keep", "log_every", "save_every", "evaluate_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        for name in ("workers", "max_nonfinite"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    steps: updates done. stopped: by a signal, before the end. evaluations: (step, numbers) of this process.
    seconds: spent on updates, not on evaluation.
    """

    steps: int
    stopped: bool
    evaluations: list[tuple[int, dict[str, float]]]
    seconds: float


class NonFinite(ArithmeticError):
    """A loss or gradient that is infinite or not a number; the message says where its batch was captured."""


class Trainer:
    """Trains a recipe's modules, in a run folder or (for short runs) without a trace.

    The run folder holds `checkpoints`, `metrics.jsonl`, what the recipe exports, and `captured` batches.
    """

    def __init__(
        self, recipe: Recipe, run: RunConfig, folder: Path | None = None, world: World | None = None
    ) -> None:
        self.recipe, self.run, self.folder = recipe, run, folder
        self.world = world = world or World()
        if recipe.batch_size % (world.size * run.accumulate):
            raise ValueError(
                f"a batch of {recipe.batch_size} cannot be shared evenly by {world.size} ranks with "
                f"{run.accumulate} backward passes each"
            )
        for name, module in recipe.modules.items():
            recipe.modules[name] = spread(module, world, run.parallel, run.compile)
        self.optimizer = recipe.optimizer()
        self.store = None if folder is None else Store(folder / CHECKPOINTS, world, run.keep)
        self.nonfinite = 0

    def fit(self, label: str | None = None) -> Outcome:
        """Train from the newest sound checkpoint, or from the start, to the end or until a signal asks to stop."""
        recipe, run, world = self.recipe, self.run, self.world
        start = self.resume()
        folder = self.folder if world.main else None
        evaluations: list[tuple[int, dict[str, float]]] = []
        done, stopped, seconds, logged = start, False, 0.0, (start, time.perf_counter())
        with ExitStack() as stack:
            stack.enter_context(_own_randomness(world.device))
            stop = stack.enter_context(stop_requests())
            stack.enter_context(logging_redirect_tqdm())
            log = stack.enter_context(
                Log(
                    folder,
                    start,
                    tensorboard=run.tensorboard,
                    wandb=run.wandb,
                    config=dict(recipe.settings()),
                )
            )
            bar = stack.enter_context(self._bar(start, label or recipe.name))
            profiler = stack.enter_context(self._profiler())
            self.train_mode(True)
            batches = recipe.batches(start, world) if start < recipe.total_steps else iter(())
            while done < recipe.total_steps and not stopped:
                began = time.perf_counter()
                metrics, stopped = self.update(done, next(batches), stop)
                done += 1
                seconds += time.perf_counter() - began
                bar.update(recipe.batch_size)
                if profiler is not None:
                    profiler.step()
                if self._due(done, run.log_every):
                    now = time.perf_counter()
                    speed = (done - logged[0]) * recipe.batch_size / (now - logged[1])
                    log.write(done, {**self._numbers(metrics), "images_per_second": speed})
                    logged = done, now
                if not stopped and self._due(done, run.evaluate_every or recipe.steps_per_epoch):
                    evaluations.append((done, self.evaluate()))
                    log.write(done, evaluations[-1][1])
                    bar.set_postfix({name: f"{value:.4g}" for name, value in evaluations[-1][1].items()})
                if stopped or self._due(done, run.save_every or recipe.steps_per_epoch):
                    self.save(done)
            self._finish(stopped)
        return Outcome(done, stopped, evaluations, seconds)

    # ------------------------------------------------------------------ one update

    def update(self, step: int, batch: Any, stop: StopRequest) -> tuple[dict[str, Tensor], bool]:
        """Update number `step`: its metrics, and whether a signal asks to stop after it."""
        recipe = self.recipe
        torch.manual_seed(derived_seed(recipe.seed, "model", step, self.world.rank))
        set_schedules(self.optimizer, step)
        metrics = self.gradients(step, batch)
        for name, module in recipe.modules.items():
            gradients = [p.grad for p in module.parameters() if p.grad is not None]
            if gradients:
                metrics[f"grad_norm/{name}"] = clip_(gradients, recipe.clip)
        # One agreement of all ranks: is this update sound, shall we stop, is a checkpoint still being written?
        finite = torch.isfinite(torch.stack([value.double() for value in metrics.values()])).all()
        writing = self.store is not None and self.store.writing
        bad, stopped, writing = self.world.any(~finite, bool(stop), writing)
        if bad:
            self._capture(step, batch, metrics)
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
        if not bad:
            recipe.after_step(step)
        if self.store is not None and self.store.unsettled and not writing:
            self.store.settle()
        metrics["lr"] = torch.tensor(max(group["lr"] for group in self.optimizer.param_groups))
        return metrics, stopped

    def gradients(self, step: int, batch: Any) -> dict[str, Tensor]:
        """The gradients of a batch, in as many passes as asked for, and the loss and its companions."""
        parts = self.recipe.split(batch, self.run.accumulate)
        total: dict[str, Tensor] = {}
        for number, part in enumerate(parts):
            with gradients_shared(self.recipe.modules.values(), share=number == len(parts) - 1):
                with self.recipe.autocast(self.world.device):
                    loss, metrics = self.recipe.loss(part, step)
                (loss / len(parts)).backward()
            for name, value in {"loss": loss, **metrics}.items():
                total[name] = total.get(name, 0) + value.detach() / len(parts)
        return total

    def evaluate(self) -> dict[str, float]:
        """What the recipe says of its modules, in evaluation mode."""
        self.train_mode(False)
        with torch.no_grad(), self.recipe.autocast(self.world.device):
            numbers = self.recipe.evaluate(self.world)
        self.train_mode(True)
        return numbers

    # ------------------------------------------------------------------ state

    def state(self) -> dict[str, Tensor]:
        """All tensors that decide what comes next, by name; the tensors themselves, no copies."""
        tensors: dict[str, Tensor] = {}
        names: dict[int, str] = {}
        for name, module in self.recipe.modules.items():
            tensors |= {f"modules.{name}.{key}": value for key, value in bare(module).state_dict().items()}
            names |= {id(p): f"{name}.{key}" for key, p in bare(module).named_parameters()}
        for parameter, state in self.optimizer.state.items():
            prefix = f"optimizer.{names[id(parameter)]}"
            tensors |= {f"{prefix}.{key}": value for key, value in state.items()}
        return tensors

    def resume(self) -> int:
        """Load the newest sound checkpoint; the number of updates that it had done, 0 without one."""
        if self.store is None:
            return 0
        state = self.state()
        found = self.store.newest(state)
        if found is None:
            return 0
        path, manifest = found
        _require_same(manifest.about, self._about(), path)
        self.store.load(path, state)
        logger.info("resuming from %s", path)
        return manifest.step

    def save(self, step: int) -> None:
        """Begin to write a checkpoint."""
        if self.store is not None:
            self.store.begin(step, self.state(), self._about())

    def _finish(self, stopped: bool) -> None:
        if self.store is None or self.folder is None:
            return
        if not self.store.settle():
            raise OSError(f"the last checkpoint could not be written to {self.store.folder}")
        if not stopped:
            self.recipe.export(self.folder, self.world)

    def _capture(self, step: int, batch: Any, metrics: dict[str, Tensor]) -> None:
        """Keep the batch and the state of an update that is not finite, and give up if there were too many."""
        values = ", ".join(f"{name} {value.item():g}" for name, value in metrics.items())
        message = f"update {step} is not finite: {values}"
        if self.folder is not None:
            store = Store(self.folder / CAPTURED, self.world, self.run.keep)
            store.begin(step, self.state(), self._about(), own=batch._asdict())
            store.settle()
            path = store.folder / f"step-{step:08d}"
            message += f"; its batch was captured, see `quickvit train replay {path}`"
        self.nonfinite += 1
        if self.nonfinite > self.run.max_nonfinite:
            raise NonFinite(message)
        logger.warning("%s; it is left out", message)

    def _about(self) -> dict[str, Any]:
        """What a checkpoint says of its run."""
        about = {"recipe": self.recipe.name, "settings": dict(self.recipe.settings())}
        result: dict[str, Any] = json.loads(json.dumps({**about, "accumulate": self.run.accumulate}))
        return result

    # ------------------------------------------------------------------ around the loop

    def _due(self, done: int, every: int) -> bool:
        return done % every == 0 or done == self.recipe.total_steps

    def train_mode(self, training: bool) -> None:
        """Set the modules to training or evaluation; what follows another without being trained is evaluated."""
        for module in self.recipe.modules.values():
            module.train(training and trained(module))

    def _numbers(self, metrics: dict[str, Tensor]) -> dict[str, float]:
        """Metrics averaged over the ranks, as numbers."""
        values = torch.stack([value.to(self.world.device, torch.float64) for value in metrics.values()])
        means = self.world.sum(values) / self.world.size
        return dict(zip(metrics, means.tolist(), strict=True))

    def _bar(self, start: int, label: str) -> tqdm[Any]:
        """Progress in images, with their rate and the time left."""
        size = self.recipe.batch_size
        return tqdm(
            total=self.recipe.total_steps * size,
            initial=start * size,
            desc=label,
            unit="img",
            unit_scale=True,
            disable=not self.world.main,
        )

    @contextmanager
    def _profiler(self) -> Iterator[profile | None]:
        if not self.run.profile or self.folder is None:
            yield None
            return
        target = self.folder / "profile" / f"rank-{self.world.rank:05d}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        waiting = schedule(wait=5, warmup=3, active=5, repeat=1)
        with profile(
            schedule=waiting, on_trace_ready=lambda p: p.export_chrome_trace(str(target))
        ) as profiler:
            yield profiler


def _require_same(theirs: dict[str, Any], ours: dict[str, Any], path: Path) -> None:
    """Refuse to go on with other settings than before."""
    before, now = ({"recipe": about.get("recipe"), **about.get("settings", {})} for about in (theirs, ours))
    names = [name for name in (before | now) if before.get(name) != now.get(name)]
    if names:
        changes = ", ".join(f"{name} {now.get(name)!r} instead of {before.get(name)!r}" for name in names)
        raise ValueError(
            f"{path} is of a run with other settings: asked for {changes}; use another folder for another run"
        )


@contextmanager
def _own_randomness(device: torch.device) -> Iterator[None]:
    """Seed inside without changing the generators of whoever calls."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield
