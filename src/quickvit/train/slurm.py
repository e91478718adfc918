"""Runs on a Slurm cluster, through submitit (the extra `quickvit[slurm]`)."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from quickvit.train.signals import EXIT_REQUEUE
from quickvit.train.trainer import Outcome


@dataclass(frozen=True)
class SlurmConfig:
    """A Slurm cluster to run on. Without `nodes`, the run is carried out here."""

    nodes: int | None = None
    """Nodes to ask for; submits the run instead of carrying it out."""
    gpus: int = 8
    """GPUs, and processes, per node."""
    cpus: int = 10
    """Cores per process."""
    hours: float = 72
    """Time limit. A run that needs longer saves its state, is queued again and goes on."""
    partition: str | None = None
    """Partition to submit to."""
    account: str | None = None
    """Account to charge."""
    warning: int = 180
    """Seconds before its end at which a job is told to save its state."""
    cluster: Literal["slurm", "local"] = "slurm"
    """local starts the processes on this machine instead, to try things out."""


class Job:
    """A piece of training as submitit runs it, once for each process."""

    def __init__(self, work: Callable[[], Outcome]) -> None:
        self.work = work

    def __call__(self) -> int:
        """Train; a run that was stopped is queued again."""
        import submitit

        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False, overwrite=True)
        outcome = self.work()
        job = os.environ.get("SLURM_JOB_ID")
        if outcome.stopped and job is not None and os.environ["RANK"] == "0":
            subprocess.run(["scontrol", "requeue", job], check=True)
        return EXIT_REQUEUE if outcome.stopped else 0


def submit(work: Callable[[], Outcome], config: SlurmConfig, folder: Path) -> Any:
    """Submit a piece of training; submitit's job, whose logs go to `folder`."""
    try:
        import submitit
    except ImportError as error:
        message = 'submitit is not installed: pip install "quickvit[slurm]"'
        raise ModuleNotFoundError(message, name="submitit") from error
    executor = submitit.AutoExecutor(folder=folder, cluster=config.cluster)
    executor.update_parameters(
        nodes=config.nodes,
        tasks_per_node=config.gpus,
        cpus_per_task=config.cpus,
        timeout_min=round(60 * config.hours),
        name="quickvit",
    )
    if config.cluster == "slurm":
        executor.update_parameters(
            slurm_gpus_per_node=config.gpus,
            slurm_partition=config.partition,
            slurm_account=config.account,
            slurm_signal_delay_s=config.warning,
        )
    return executor.submit(Job(work))
