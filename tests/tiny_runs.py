"""Small runs for the tests, in processes of their own that can be killed.

A server that has imported everything once forks them, so that starting one takes no time.
"""

import multiprocessing
import os
import random
import signal
import socket
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.utils.data._utils import worker as data_worker

from quickvit.recipes import RECIPES, Deit3Config, Dinov2Config
from quickvit.train import EXIT_REQUEUE, RunConfig, checkpoint, read_metrics

processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["quickvit.recipes", "quickvit.provenance"])
torch.set_num_threads(1)

CLASSES, IMAGES = 3, 14
STEPS_PER_EPOCH = 5
MODEL = {"embed_dim": 32, "depth": 2, "num_heads": 2}


def config(data: Path, out: Path, run: dict[str, Any] | None = None, **changes: Any) -> Deit3Config:
    """Two octic and standard blocks, stochastic depth, mixing, an average: 3 epochs of 5 steps."""
    values = {
        "model": "quickvit_h8_tiny_patch16_224",
        "img_size": 16,
        "patch_size": 4,
        "model_args": MODEL,
        "epochs": 3,
        "warmup_epochs": 1,
        "batch_size": 8,
        "mixing_group": 4,
        "drop_path": 0.2,
        "average": 0.9,
        "layer_scale": 0.1,
        **changes,
    }
    carried = {"workers": 0, "log_every": 1, "save_every": 3, "keep": 2, "device": "cpu", **(run or {})}
    return Deit3Config(data=str(data), out=out, **values, run=RunConfig(**carried))


def views_config(
    data: Path | str, out: Path, run: dict[str, Any] | None = None, **changes: Any
) -> Dinov2Config:
    """DINOv2 with the same model, two global and two local views, and small heads: 10 updates."""
    values = {
        "model": "quickvit_h8_tiny_patch16_224",
        "preset": "small",
        "img_size": 16,
        "local_size": 8,
        "local_views": 2,
        "patch_size": 4,
        "model_args": MODEL,
        "steps": 10,
        "batch_size": 8,
        "group": 2,
        "prototypes": 24,
        "head_hidden": 32,
        "head_bottleneck": 16,
        "drop_path": 0.2,
        "first_teacher_temperature": 0.04,
        "teacher_temperature": 0.07,
        "koleo_weight": 0.1,
        "centering": "softmax",
        "momentum": 0.992,
        "crop_ratio": 1.0,
        "snapshots": False,
        **changes,
    }
    carried = {"workers": 0, "log_every": 1, "save_every": 3, "keep": 2, "device": "cpu", **(run or {})}
    return Dinov2Config(data=str(data), out=out, **values, run=RunConfig(**carried))


Config = Deit3Config | Dinov2Config


def work(chosen: Config, slow: float = 0.0) -> None:
    """Train, as a process; `slow` makes each flush to the disk take so many seconds more."""
    # What it prints is of no interest, but what goes wrong is.
    os.dup2(os.open(chosen.out.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    # The loader's workers are forked, as they are in a process that a user starts.
    multiprocessing.set_start_method("fork", force=True)
    # They look after their parent every five seconds otherwise, and would outlive it so long.
    data_worker.MP_STATUS_CHECK_INTERVAL = 0.1
    flush = checkpoint._flush
    if slow:
        checkpoint._flush = lambda path: (time.sleep(slow), flush(path))
    train = next(recipe.train for recipe in RECIPES.values() if recipe.config is type(chosen))
    raise SystemExit(EXIT_REQUEUE if train(chosen, "").stopped else 0)


def start(chosen: Config, slow: float = 0.0) -> ForkServerProcess:
    """Begin to train in a process."""
    process = processes.Process(target=work, args=(chosen, slow))
    process.start()
    return process


def run(chosen: Config) -> int:
    """Train in a process; its exit code."""
    process = start(chosen)
    process.join(120)
    return finished(process, chosen)


def finished(process: ForkServerProcess, chosen: Config) -> int:
    """The exit code of a process; what it printed if that is an error."""
    if process.exitcode not in (0, EXIT_REQUEUE, -signal.SIGKILL):
        raise AssertionError(f"{process.exitcode}: {chosen.out.with_suffix('.log').read_text()[-4000:]}")
    return process.exitcode


def wait_for(out: Path, step: int, process: ForkServerProcess) -> None:
    """Wait until a run has logged so many updates."""
    while process.is_alive() and last_step(out) < step:
        time.sleep(0.002)


def killed_and_resumed(chosen: Config, total: int, kills: int, seed: int) -> int:
    """Kill a run at random moments, then let it end; how many of the moments lay within a save."""
    generator = random.Random(seed)
    within = 0
    for step in sorted(generator.sample(range(total), kills)):
        process = start(chosen, slow=0.01)
        wait_for(chosen.out, step, process)
        time.sleep(generator.expovariate(100))
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        within += any((chosen.out / "checkpoints").glob(".step-*"))
    assert run(chosen) == 0
    return within


def run_ranks(chosen: Config, size: int) -> None:
    """Train in several processes together."""
    for process in start_ranks(chosen, size):
        process.join(120)
        assert finished(process, chosen) == 0


def start_ranks(chosen: Config, size: int) -> list[ForkServerProcess]:
    """Begin to train in several processes together."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    group = [processes.Process(target=rank_work, args=(chosen, r, size, port)) for r in range(size)]
    for process in group:
        process.start()
    return group


def rank_work(chosen: Config, rank: int, size: int, port: int) -> None:
    """What torchrun does for a process."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    os.environ.update(zip(names, map(str, (rank, rank, size, "localhost", port)), strict=True))
    work(chosen)


# ---------------------------------------------------------------------- what a run left


def last_state(out: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint of one process."""
    return tensors(max((out / "checkpoints").glob("step-*")) / "rank-00000.safetensors")


def tensors(path: Path) -> dict[str, torch.Tensor]:
    """The content of a safetensors file."""
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def last_step(out: Path) -> int:
    """The last update that a run has logged."""
    rows = read_metrics(out)
    return rows[-1]["step"] if rows else 0


def metrics(out: Path) -> list[dict[str, float]]:
    """The metrics of a run, less the time and the memory that it took."""
    return [
        {name: row[name] for name in row if name not in ("images_per_second", "memory_mib")}
        for row in read_metrics(out)
    ]


def assert_same_run(out: Path, expected: Path) -> None:
    """Weights, optimiser and average bitwise equal, and the same metrics."""
    exported = (tensors(folder / "model.safetensors") for folder in (out, expected))
    for ours, theirs in ((last_state(out), last_state(expected)), exported):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name], tensor), name
    assert metrics(out) == metrics(expected)
