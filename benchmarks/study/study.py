"""The study: Quick ViTs and the ViT they replace, trained alike on small sets of real images.

    python benchmarks/study/study.py cifar10 --data CIFAR10 --runs RUNS --studies families --seeds 0 1 2

DATA has {train,test}/CLASS/*. Several runs share the GPU. A run is done when its file is in --results; what is
interrupted goes on with the next start of the same command, so the study can be done piece by piece (--minutes).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quickvit.bench.flops import count
from quickvit.cli.build import load_model
from quickvit.layers import INVARIANTS

QUICKVIT = (sys.executable, "-m", "quickvit")
HERE = Path(__file__).resolve().parent


@dataclass(frozen=True)
class Setting:
    """A data set with what all its runs share: size and depth of the models, recipe, and how the result is judged."""

    recipe: str
    size: str
    depth: int
    options: tuple[str, ...]
    protocol: str

    def model(self, family: str) -> str:
        """The full name of a family's model, or of the baseline."""
        return ("baseline_" if family == "vit" else f"quickvit_{family}_") + f"{self.size}_patch16_224"


SETTINGS = {
    "cifar10": Setting(
        "deit3",
        "tiny",
        12,
        (
            *("--img-size=32", "--patch-size=4", "--batch-size=512", "--epochs=30", "--learning-rate=3e-3"),
            *("--repeats=1", "--run.evaluate-every=485", "--run.save-every=970"),
        ),
        "accuracy",
    ),
    "pbc_blood_96": Setting(
        "deit3",
        "tiny",
        12,
        (
            *("--img-size=96", "--patch-size=8", "--batch-size=256", "--epochs=30", "--learning-rate=3e-3"),
            *("--repeats=1", "--run.evaluate-every=230", "--run.save-every=460"),
        ),
        "accuracy",
    ),
}


@dataclass(frozen=True)
class Run:
    """One model to train. labels: its name in each study that it belongs to."""

    family: str
    seed: int
    labels: Mapping[str, str]
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its folder."""
        study, label = next(iter(self.labels.items()))
        return f"{study}-{label}-{self.seed}"


def runs(setting: Setting, seed: int) -> Iterator[Run]:
    """All runs of one seed, those of the main comparison first."""
    half = f"k={setting.depth // 2}"
    yield Run("vit", seed, {"families": "vit"})
    yield Run(
        "h8",
        seed,
        {"families": "h8", "depth": half, "lift": "octic", "initialisation": "matched", "norm": "paper"},
    )
    yield Run("i8", seed, {"families": "i8", "invariants": "power_spectrum"})
    yield Run("d8", seed, {"families": "d8"})
    yield Run("h2", seed, {"families": "h2"})
    for quarter in (0, 1, 3, 4):
        k = quarter * setting.depth // 4
        yield Run("h8", seed, {"depth": f"k={k}"}, (f"--octic-depth={k}",))
    for invariant in INVARIANTS:
        if invariant != "power_spectrum":
            yield Run("i8", seed, {"invariants": invariant}, (f"--invariant={invariant}",))
    yield Run("h8", seed, {"lift": "free"}, ("--lift=free",))
    yield Run("h8", seed, {"initialisation": "released"}, ('--model-args={"released_init": true}',))
    yield Run("h8", seed, {"norm": "released"}, ('--model-args={"released_norm": true}',))


class Job:
    """A run in the making: training, then testing in all poses, each in a process of its own."""

    def __init__(self, run: Run, setting: Setting, arguments: argparse.Namespace) -> None:
        self.run, self.setting, self.arguments = run, setting, arguments
        self.folder = arguments.runs / run.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.command = [
            *("train", setting.recipe, f"--model={setting.model(run.family)}", f"--data={arguments.data}"),
            *(
                f"--out={self.folder}",
                f"--seed={run.seed}",
                *setting.options,
                *run.options,
                "--cache=true",
                "--colors=device",
            ),
            *(f"--run.workers={arguments.workers}", f"--run.compile={arguments.compile}", *arguments.extra),
        ]
        self.testing = False
        self.process = self._start(self.command, self.folder / "train.log")

    def _start(self, command: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
        with output.open("ab") as out, (self.folder / "log").open("ab") as log:
            return subprocess.Popen([*QUICKVIT, *command], stdout=out, stderr=log)

    def done(self) -> bool:
        """Whether there is nothing left to wait for; a job that was trained is tested next."""
        code = self.process.poll()
        if code is None:
            return False
        if code:
            print(f"{self.run.name}: stopped with code {code}, see {self.folder / 'log'}", flush=True)
            return True
        if self.testing:
            self._record()
            return True
        self.testing = True
        poses = self.folder / "poses.json"
        poses.unlink(missing_ok=True)
        options = (
            f"--data={self.arguments.data}",
            "--batch-size=500",
            f"--workers={self.arguments.workers}",
            "--json",
        )
        test = ["eval", "rotation", str(self.folder), f"--protocol={self.setting.protocol}", *options]
        self.process = self._start(test, poses)
        return False

    def _record(self) -> None:
        record = result(self.folder, self.run, self.arguments.dataset, self.setting)
        for study, label in self.run.labels.items():
            path = place(self.arguments, study, label, self.run.seed)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(
                json.dumps({"study": study, "name": label, **record}, indent=1) + "\n", encoding="utf-8"
            )
        upright = record["poses"][0]
        print(f"{self.run.name}: {upright}", flush=True)


def place(arguments: argparse.Namespace, study: str, label: str, seed: int) -> Path:
    """Where the result of a run is kept."""
    return arguments.results / f"{arguments.dataset}-{study}" / f"{label}-{seed}.json"


def result(folder: Path, run: Run, dataset: str, setting: Setting) -> dict[str, Any]:
    """What a finished run folder says."""
    config = json.loads((folder / "config.json").read_text())
    start = json.loads((folder / "starts.jsonl").read_text().splitlines()[-1])
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rates = [line["images_per_second"] for line in metrics if "images_per_second" in line]
    with torch.device("meta"):
        cost = count(load_model(str(folder)))
    return {
        "dataset": dataset,
        "seed": run.seed,
        "model": {"name": setting.model(run.family), "options": list(run.options)},
        "gmacs": cost.macs / 1e9,
        "parameters": cost.parameters,
        "training": {
            "recipe": setting.recipe,
            "epochs": config.get("epochs"),
            "steps": metrics[-1]["step"],
            "images_per_s": statistics.median(rates) if rates else None,
        },
        "curve": [line for line in metrics if any(key.startswith("eval/") for key in line)],
        "poses": json.loads((folder / "poses.json").read_text())["rows"],
        "provenance": {key: start[key] for key in ("hardware", "versions", "commit", "date", "command")},
    }


def main() -> int:
    """Carry out what is missing of the chosen studies."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dataset", choices=SETTINGS)
    parser.add_argument("--data", required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=HERE.parent / "results")
    parser.add_argument(
        "--studies", nargs="+", help="families, depth, invariants, lift, initialisation, norm; all"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--families", nargs="+", help="only these")
    parser.add_argument("--jobs", type=int, default=5, help="runs at a time")
    parser.add_argument("--workers", type=int, default=3, help="of each run")
    parser.add_argument("--compile", default="reduce-overhead" if torch.cuda.is_available() else "none")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="then save, stop, and go on next time"
    )
    parser.add_argument(
        "--extra", nargs=argparse.REMAINDER, default=[], help="further options of the training"
    )
    arguments = parser.parse_args()
    setting = SETTINGS[arguments.dataset]
    waiting = [
        run
        for seed in arguments.seeds
        for run in runs(setting, seed)
        if (arguments.studies is None or set(arguments.studies) & set(run.labels))
        and (arguments.families is None or run.family in arguments.families)
        and not all(place(arguments, *label, seed).exists() for label in run.labels.items())
    ]
    deadline = time.monotonic() + 60 * arguments.minutes
    running: list[Job] = []
    while waiting or running:
        running = [job for job in running if not job.done()]
        if time.monotonic() > deadline:
            # Training saves and stops; the processes are this one's own.
            for job in running:
                job.process.send_signal(signal.SIGTERM)
            for job in running:
                job.process.wait()
            print(f"{len(running)} interrupted, {len(waiting)} not begun", flush=True)
            return os.EX_TEMPFAIL
        while waiting and len(running) < arguments.jobs:
            running.append(Job(waiting.pop(0), setting, arguments))
        time.sleep(0.2)
    return 0


if __name__ == "__main__":
    sys.exit(main())
