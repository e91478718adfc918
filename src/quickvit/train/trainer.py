"""The training loop, shared by all recipes.

Everything random is a function of (seed, step, rank) and every schedule of the step, so a run that was stopped at
any moment and resumed makes the same updates as one that was not.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.contrib.logging import logging_redirect_tqdm

from quickvit.data import derived_seed
from quickvit.models import CheckpointError
from quickvit.train.checkpoint import Store
from quickvit.train.compiling import Compile, has_graphs
from quickvit.train.distributed import Parallel, World, bare, gradients_shared, spread, trained
from quickvit.train.journal import EVALUATION, Journal, read_metrics
from quickvit.train.norms import clip_
from quickvit.train.optimizers import set_schedules
from quickvit.train.recipe import Recipe
from quickvit.train.signals import StopRequest, stop_requests

logger = logging.getLogger(__name__)

CHECKPOINTS = "checkpoints"
CAPTURED = "captured"
# Processes that load data, where there are as many cores.
WORKERS = 4


def _cores() -> int:
    """The cores that this process may use, where the system tells; PyTorch warns of more workers than that."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@dataclass(frozen=True)
class RunConfig:
    """How a run is carried out. Nothing here decides what it computes, so all of it may change on resuming."""

    device: str | None = None
    """A GPU for each process where there are any, else the CPU."""
    parallel: Parallel = "ddp"
    """With several processes: ddp replicates the weights, fsdp shards them (FSDP2), for models that need it."""
    compile: Compile = "none"
    """torch.compile's mode for training; reduce-overhead is the fastest for Quick ViTs on a GPU. blocks compiles
    each block by itself, and those that are alike once: a deep model is no more to compile than a few blocks."""
    accumulate: int = 1
    """Backward passes per update, each over a part of the batch, where a batch does not fit into memory."""
    workers: int = field(default_factory=lambda: min(WORKERS, _cores()))
    """Processes that load data, for each rank; by default four, or one for each core where there are fewer."""
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
        self.world = recipe.world = world = world or World()
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
        self.graphs = world.device.type == "cuda" and has_graphs(run.compile)

    def fit(self, label: str | None = None, begins: Callable[[int], None] | None = None) -> Outcome:
        """Train from the newest sound checkpoint, or from the start, to the end or until a signal asks to stop.

        begins: called with the number of updates done before, once nothing speaks against beginning.
        """
        recipe, run = self.recipe, self.run
        done, stopped = self.resume(), False
        with self._surroundings(done, label or recipe.name) as (stop, journal):
            # What is wrong with the data shows here, not after an evaluation.
            batches = recipe.batches(done, self.world)
            if begins is not None:
                begins(done)
            self.train_mode(True)
            if (
                (done or recipe.evaluates_first)
                and self._due(done, run.evaluate_every)
                and not self._evaluated(done)
            ):
                # Before the first update; or the process before was asked to stop, and left this to us.
                self.evaluate(done, journal)
            while done < recipe.total_steps and not stopped:
                with journal.update():
                    metrics, stopped = self.update(done, next(batches), stop)
                done += 1
                if self._due(done, run.log_every):
                    journal.write(done, {**self._numbers(metrics), **self._memory()})
                # Saved first: an evaluation that fails must not cost the updates before it.
                if stopped or self._due(done, run.save_every):
                    self.save(done)
                if not stopped and self._due(done, run.evaluate_every):
                    if self.store is not None and self.world.size > 1:
                        # Ranks that fail one by one could not do this any more.
                        self.store.settle()
                    self.evaluate(done, journal)
            self._finish(stopped)
        return Outcome(done, stopped, journal.evaluations, journal.seconds)

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
        finite = self._stack(metrics).isfinite().all()
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
        rates = [group["lr"] for group in self.optimizer.param_groups]
        metrics["lr"] = torch.tensor(max(rates), dtype=torch.float64)
        return metrics, stopped

    def gradients(self, step: int, batch: Any) -> dict[str, Tensor]:
        """The gradients of a batch, in as many passes as asked for, and the loss and its companions."""
        parts = self.recipe.split(batch, self.run.accumulate)
        total: dict[str, Tensor] = {}
        for number, part in enumerate(parts):
            if self.graphs:
                # Results of CUDA graphs hold from here to the next beginning, whatever else is called in between.
                torch.compiler.cudagraph_mark_step_begin()
            with gradients_shared(self.recipe.modules.values(), share=number == len(parts) - 1):
                with self.recipe.autocast(self.world.device):
                    loss, metrics = self.recipe.loss(part, step)
                (loss / len(parts)).backward()
            if self.graphs and len(parts) > 1 and number == 0:
                self._own_gradients()
            for name, value in {"loss": loss, **metrics}.items():
                total[name] = total.get(name, 0) + value.detach() / len(parts)
        return total

    def _own_gradients(self) -> None:
        """Copy gradients out of the memory of a CUDA graph, to add those of its next run to them."""
        for module in self.recipe.modules.values():
            for p in module.parameters():
                p.grad = None if p.grad is None else p.grad.clone()

    def evaluate(self, done: int, journal: Journal) -> None:
        """Note what the recipe says of its modules after so many updates, in evaluation mode.

        Nothing is compiled for it: that would take longer than most evaluations.
        """
        self.train_mode(False)
        uncompiled = nullcontext() if self.run.compile == "none" else torch.compiler.set_stance("force_eager")
        with uncompiled, torch.no_grad(), self.recipe.autocast(self.world.device):
            journal.evaluation(done, self.recipe.evaluate(self.world))
        self.train_mode(True)
        if self.world.device.type == "cuda":
            # What an evaluation needs is not what training needs.
            torch.cuda.reset_peak_memory_stats(self.world.device)

    def _evaluated(self, done: int) -> bool:
        """Whether the evaluation after so many updates is in the log already."""
        rows = read_metrics(self.folder) if self.world.main and self.folder is not None else []
        names = {name for row in rows if row["step"] == done for name in row}
        return self.world.any(any(name.startswith(EVALUATION) for name in names))[0]

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
        found = self.store.newest(state, self._require_same)
        if found is None:
            return 0
        path, manifest = found
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
        settled = self.store.settle()
        if not stopped:
            self.recipe.export(self.folder, self.world)
        if not settled:
            raise OSError(f"the last checkpoint could not be written to {self.store.folder}")

    def _keep_what_was_begun(self) -> None:
        """However the loop ends; but ranks that fail one by one cannot agree on a checkpoint any more."""
        if self.store is not None and self.world.size == 1:
            self.store.settle()

    def _capture(self, step: int, batch: Any, metrics: dict[str, Tensor]) -> None:
        """Keep the batch and the state of an update that is not finite, and give up if there were too many."""
        values = ", ".join(f"{name} {value.item():g}" for name, value in metrics.items())
        message = f"update {step} is not finite: {values}"
        if self.folder is not None:
            store = Store(self.folder / CAPTURED, self.world, self.run.keep)
            store.begin(step, self.state(), self._about(), own=batch._asdict())
            if store.settle():
                message += f"; its batch was captured, see `quickvit train replay {store.path(step)}`"
        if self.store is not None:
            self.store.settle()
        self.nonfinite += 1
        if self.nonfinite > self.run.max_nonfinite:
            raise NonFinite(message)
        logger.warning("%s; it is left out", message)

    def _about(self) -> dict[str, Any]:
        """What a checkpoint says of its run."""
        about = {"recipe": self.recipe.name, "settings": dict(self.recipe.settings())}
        result: dict[str, Any] = json.loads(json.dumps({**about, "accumulate": self.run.accumulate}))
        return result

    def _require_same(self, path: Path, theirs: dict[str, Any]) -> None:
        """Refuse to go on with other settings than before."""
        if not isinstance(theirs.get("settings", {}), dict):
            raise CheckpointError(f"its settings are no table but {theirs['settings']!r}")
        before, now = (
            {"recipe": about.get("recipe"), **about.get("settings", {})} for about in (theirs, self._about())
        )
        for name in self.recipe.later_settings:
            before.setdefault(name, now.get(name))
        names = [name for name in (before | now) if before.get(name) != now.get(name)]
        if names:
            changes = ", ".join(f"{name} {now.get(name)!r} instead of {before.get(name)!r}" for name in names)
            raise ValueError(
                f"{path} is of a run with other settings: asked for {changes}; use another folder for another run"
            )

    # ------------------------------------------------------------------ around the loop

    def _due(self, done: int, every: int | None) -> bool:
        """Whether so many updates are a multiple of `every` (None: of an epoch), or all."""
        return done % (every or self.recipe.steps_per_epoch) == 0 or done == self.recipe.total_steps

    def train_mode(self, training: bool) -> None:
        """Set the modules to training or evaluation; what follows another without being trained is evaluated."""
        for module in self.recipe.modules.values():
            module.train(training and trained(module))

    def _stack(self, metrics: dict[str, Tensor]) -> Tensor:
        return torch.stack([value.to(self.world.device, torch.float64) for value in metrics.values()])

    def _numbers(self, metrics: dict[str, Tensor]) -> dict[str, float]:
        """Metrics averaged over the ranks, as numbers."""
        means = self.world.sum(self._stack(metrics)) / self.world.size
        return dict(zip(metrics, means.tolist(), strict=True))

    def _memory(self) -> dict[str, float]:
        """The most GPU memory that this process held for training since its last evaluation; nothing on a CPU."""
        device = self.world.device
        return (
            {"memory_mib": torch.cuda.max_memory_allocated(device) / 2**20} if device.type == "cuda" else {}
        )

    @contextmanager
    def _surroundings(self, start: int, label: str) -> Iterator[tuple[StopRequest, Journal]]:
        """What goes on around the loop: signals, metrics, progress, a profiler, and randomness of its own."""
        run, device, folder = self.run, self.world.device, self.folder
        with ExitStack() as stack:
            stack.callback(self._keep_what_was_begun)
            # Whoever calls keeps his random numbers.
            stack.enter_context(torch.random.fork_rng(devices=[device] if device.type == "cuda" else []))
            stop = stack.enter_context(stop_requests())
            stack.enter_context(logging_redirect_tqdm())
            journal = stack.enter_context(
                Journal(
                    folder if self.world.main else None,
                    start,
                    self.recipe.total_steps,
                    self.recipe.batch_size,
                    label if self.world.main else None,
                )
            )
            if run.tensorboard:
                journal.add_tensorboard()
            if run.wandb is not None:
                journal.add_wandb(run.wandb, dict(self.recipe.settings()))
            if run.profile and folder is not None:
                journal.add_profiler(folder / "profile" / f"rank-{self.world.rank:05d}.json")
            yield stop, journal
