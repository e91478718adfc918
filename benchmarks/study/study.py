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
from quickvit.provenance import write
from quickvit.train import read_metrics

QUICKVIT = (sys.executable, "-m", "quickvit")
HERE = Path(__file__).resolve().parent
POSES = "poses"
# What of a run's configuration makes its model another than its name says.
MODEL_OPTIONS = ("octic_depth", "invariant", "lift", "model_args")
MAIN = "families"


@dataclass(frozen=True)
class Setting:
    """What runs share: recipe, size and depth of the models, options, and the protocol that judges the result."""

    recipe: str
    size: str
    depth: int
    options: tuple[str, ...]
    protocol: str = "accuracy"

    def model(self, family: str) -> str:
        """The full name of a family's model, or of the baseline."""
        return ("baseline_" if family == "vit" else f"quickvit_{family}_") + f"{self.size}_patch16_224"


def every(steps: int) -> tuple[str, str]:
    """Evaluate and save after so many updates."""
    return f"--run.evaluate-every={steps}", f"--run.save-every={steps}"


# A short budget is no place for the augmentation of 400 epochs.
LIGHT = ("--min-crop=0.4", "--three-augment=false", "--color-jitter=0", "--mixup=0", "--cutmix=0")
SHARED = ("--learning-rate=3e-3", "--repeats=1")
CIFAR10 = ("--img-size=32", "--patch-size=4", "--batch-size=512", *SHARED, *every(485))
CELLS = ("--img-size=96", "--patch-size=8", "--batch-size=256", *SHARED, *every(230))
SUPERVISED = {
    "cifar10": Setting("deit3", "tiny", 12, (*CIFAR10, *LIGHT, "--epochs=20")),
    "pbc_blood_96": Setting("deit3", "tiny", 12, (*CELLS, *LIGHT, "--epochs=30")),
}
# The augmentation of DeiT III as it is.
RECIPE = {"cifar10": Setting("deit3", "tiny", 12, (*CIFAR10, "--epochs=30"))}
# Without labels, and judged by what frozen features are good for.
SELF_SUPERVISED = {
    "pbc_blood_96": Setting(
        "dinov2",
        "tiny",
        12,
        (
            *("--preset=small", "--views=dinobloom", "--img-size=96", "--patch-size=8", "--steps=1500"),
            *every(500),
        ),
        "hematology",
    ),
}


@dataclass(frozen=True)
class Run:
    """One model to train. labels: its name in each study that it belongs to."""

    setting: Setting
    family: str
    seed: int
    labels: Mapping[str, str]
    options: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its folder."""
        study, label = next(iter(self.labels.items()))
        return f"{study}-{label}-{self.seed}"


def runs(dataset: str, seed: int) -> Iterator[Run]:
    """All runs of one seed."""
    setting = SUPERVISED[dataset]

    def run(family: str, labels: Mapping[str, str], *options: str) -> Run:
        return Run(setting, family, seed, labels, options)

    yield run("vit", {MAIN: "vit"})
    same = {"depth": f"k={setting.depth // 2}", "lift": "octic", "initialisation": "matched", "norm": "paper"}
    yield run("h8", {MAIN: "h8", **same})
    yield run("i8", {MAIN: "i8", "invariants": "power_spectrum"})
    yield run("d8", {MAIN: "d8"})
    yield run("h2", {MAIN: "h2"})
    for study, settings in (("dinov2", SELF_SUPERVISED), ("recipe", RECIPE)):
        if dataset in settings:
            for family in ("vit", "h8", "i8"):
                yield Run(settings[dataset], family, seed, {study: family})
    for quarter in (0, 1, 3, 4):
        k = quarter * setting.depth // 4
        yield run("h8", {"depth": f"k={k}"}, f"--octic-depth={k}")
    for invariant in INVARIANTS:
        if invariant != "power_spectrum":
            yield run("i8", {"invariants": invariant}, f"--invariant={invariant}")
    yield run("h8", {"lift": "free"}, "--lift=free")
    yield run("h8", {"initialisation": "released"}, '--model-args={"released_init": true}')
    yield run("h8", {"norm": "released"}, '--model-args={"released_norm": true}')


class Job:
    """A run in the making: training, then tests."""

    def __init__(self, run: Run, arguments: argparse.Namespace) -> None:
        self.run, self.arguments, self.failed = run, arguments, False
        self.folder = arguments.runs / run.name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.steps = self._steps()
        self.processes = self._start(next(self.steps))

    def _steps(self) -> Iterator[Mapping[str, Sequence[str]]]:
        """Commands that may run at the same time, by the file for what they print."""
        run, setting, arguments = self.run, self.run.setting, self.arguments
        data = f"--data={arguments.data}"
        training = (
            *("train", setting.recipe, f"--model={setting.model(run.family)}", data, f"--out={self.folder}"),
            *(f"--seed={run.seed}", *setting.options, *run.options, "--cache=true", "--crops=device"),
            *(f"--run.workers={arguments.workers}", f"--run.compile={arguments.compile}", *arguments.extra),
        )
        yield {"train.log": training}
        test = (
            *(f"--protocol={setting.protocol}", data, "--batch-size=500"),
            *(f"--workers={arguments.workers}", "--json"),
        )
        # A run without labels leaves its teachers on the way.
        models = {f"{POSES}-{teacher.stem}.json": teacher for teacher in teachers(self.folder)}
        models = models or {f"{POSES}.json": self.folder}
        yield {file: ("eval", "rotation", str(model), *test) for file, model in models.items()}

    def _start(self, commands: Mapping[str, Sequence[str]]) -> list[subprocess.Popen[bytes]]:
        processes = []
        for output, command in commands.items():
            with (self.folder / output).open("wb") as out, (self.folder / "log").open("ab") as log:
                processes.append(subprocess.Popen([*QUICKVIT, *command], stdout=out, stderr=log))
        return processes

    def done(self) -> bool:
        """Whether there is nothing left to wait for; what was trained is tested next, and then recorded."""
        codes = [process.poll() for process in self.processes]
        if None in codes:
            return False
        # A process that a signal ended has a negative code.
        if failed := [code for code in codes if code]:
            print(f"{self.run.name}: stopped with code {failed[0]}, see {self.folder / 'log'}", flush=True)
            self.failed = True
            return True
        following = next(self.steps, None)
        if following is not None:
            self.processes = self._start(following)
            return False
        record = {"dataset": self.arguments.dataset, **result(self.folder, self.run)}
        for study, label in self.run.labels.items():
            write(
                {"study": study, "name": label, **record}, place(self.arguments, study, label, self.run.seed)
            )
        print(f"{self.run.name}: {record['poses'][0]}", flush=True)
        return True


def place(arguments: argparse.Namespace, study: str, label: str, seed: int) -> Path:
    """Where the result of a run is kept."""
    return arguments.results / f"{arguments.dataset}-{study}" / f"{label}-{seed}.json"


def result(folder: Path, run: Run) -> dict[str, Any]:
    """What a finished run folder says, and its tests."""
    found = about(folder)
    if run.setting.protocol == "accuracy":
        return found | {"poses": _poses(folder / f"{POSES}.json")}
    progress = [
        {"step": int(teacher.stem.split("-")[-1]), "poses": _poses(folder / f"{POSES}-{teacher.stem}.json")}
        for teacher in teachers(folder)
    ]
    return found | {"progress": progress, "poses": progress[-1]["poses"]}


def about(folder: Path) -> dict[str, Any]:
    """What a run folder says of the model and its training."""
    config = json.loads((folder / "config.json").read_text())
    start = json.loads((folder / "starts.jsonl").read_text().splitlines()[-1])
    metrics = read_metrics(folder)
    rates, memory = (
        [line[key] for line in metrics if key in line] for key in ("images_per_second", "memory_mib")
    )
    with torch.device("meta"):
        cost = count(load_model(str(folder)))
    options = {name: config[name] for name in MODEL_OPTIONS if config.get(name) is not None}
    words = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    return {
        "seed": config["seed"],
        "model": {
            "name": config["model"],
            "options": [f"--{name.replace('_', '-')}={word}" for name, word in words.items()],
        },
        "gmacs": cost.macs / 1e9,
        "parameters": cost.parameters,
        "training": {
            # quickvit train RECIPE …
            "recipe": start["command"].split()[2],
            "epochs": config.get("epochs"),
            "steps": metrics[-1]["step"],
            "images_per_s": statistics.median(rates) if rates else None,
            "memory_mib": max(memory, default=None),
        },
        "curve": [line for line in metrics if any(key.startswith("eval/") for key in line)],
        "provenance": {key: start[key] for key in ("hardware", "versions", "commit", "date", "command")},
    }


def teachers(folder: Path) -> list[Path]:
    """The teachers that a run without labels has kept, the first before any update."""
    return sorted((folder / "teachers").glob("step-*.safetensors"))


def _poses(file: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(file.read_text())["rows"]
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Carry out what is missing of the chosen studies."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("dataset", choices=SUPERVISED)
    parser.add_argument("--data", required=True)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--results", type=Path, default=HERE.parent / "results")
    parser.add_argument(
        "--studies",
        nargs="+",
        help="families, depth, invariants, lift, initialisation, norm, dinov2, recipe; all of the data by default",
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
    arguments = parser.parse_args(argv)
    planned = list(runs(arguments.dataset, 0))
    known = {
        "studies": {study for run in planned for study in run.labels},
        "families": {run.family for run in planned},
    }
    for option, names in known.items():
        if unknown := sorted(set(getattr(arguments, option) or ()) - names):
            expected = ", ".join(sorted(names))
            parser.error(f"--{option} of {arguments.dataset} are {expected}, got {', '.join(unknown)}")
    waiting = [
        run
        for seed in arguments.seeds
        for run in runs(arguments.dataset, seed)
        if (arguments.studies is None or set(arguments.studies) & set(run.labels))
        and (arguments.families is None or run.family in arguments.families)
        and not all(place(arguments, *label, seed).exists() for label in run.labels.items())
    ]
    # The main comparison first, with all its seeds.
    waiting.sort(key=lambda run: MAIN not in run.labels)
    deadline = time.monotonic() + 60 * arguments.minutes
    running: list[Job] = []
    code = os.EX_OK
    while waiting or running:
        ended = [job for job in running if job.done()]
        running = [job for job in running if job not in ended]
        if any(job.failed for job in ended):
            code = os.EX_SOFTWARE
        if time.monotonic() > deadline:
            # Training saves and stops; the processes are this one's own.
            processes = [process for job in running for process in job.processes]
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait()
            print(f"{len(running)} interrupted, {len(waiting)} not begun", flush=True)
            return os.EX_TEMPFAIL
        while waiting and len(running) < arguments.jobs:
            running.append(Job(waiting.pop(0), arguments))
        time.sleep(0.2)
    return code


if __name__ == "__main__":
    sys.exit(main())
