"""Results that nobody measured; a small i8 and a small ViT, and what they make of two images."""

import json
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from small_models import CLASSES, small

from quickvit.report.exploration import explore
from quickvit.report.exploration_file import save_exploration

POSES = {"upright": 0.0, "90°": -30.0, "random quarter turn": -20.0, "45°": -25.0}
SURROUNDINGS = {
    "hardware": {"device": "cuda", "cpu": "A processor", "threads": 4, "gpu": "A GPU"},
    "versions": {"torch": "2.11"},
    "commit": "0123456789abcdef",
    "command": "quickvit some command",
    "date": "2026-01-02T03:04:05+00:00",
}


@pytest.fixture
def bench(tmp_path):
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    return folder


@pytest.fixture
def add_run(bench):
    """Write the result of a training run; `changes` replaces or (None) removes keys."""

    def add(
        study="families", name="vit", seed=0, top1=90.0, *, dataset="cifar10", invariant=False, **changes
    ):
        poses = [
            {"pose": pose, "top1": top1 + (0 if invariant else change), "top5": 99.0}
            for pose, change in POSES.items()
        ]
        record = {
            "study": study,
            "dataset": dataset,
            "name": name,
            "seed": seed,
            "model": {"name": f"quickvit_{name}_tiny_patch16_224"},
            "gmacs": 0.36 if name == "vit" else 0.22,
            "parameters": 5_400_000,
            "training": {"recipe": "deit3", "epochs": 40, "images_per_s": 20_000.0, "memory_mib": None},
            "curve": [{"step": step, "eval/top1": top1 * step / 40_000} for step in (200, 400)],
            "poses": poses,
            "provenance": SURROUNDINGS,
            **changes,
        }
        record = {key: value for key, value in record.items() if value is not None}
        path = bench / "results" / f"{dataset}-{study}" / f"{name}-{seed}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record), encoding="utf-8")
        return path

    return add


@pytest.fixture
def add_bench(bench):
    """Write a record of `quickvit bench`: rows are (case, name, ratio) or with more of a row's fields."""

    def add(file, benchmark, *rows, **changes):
        results = [
            {
                "case": case,
                "name": name,
                "dtype": "bfloat16",
                "ms": 2.0,
                "spread": 0.01,
                "ratio": ratio,
                **more,
            }
            for case, name, ratio, more in (row if len(row) == 4 else (*row, {}) for row in rows)
        ]
        settings = {"batch": 64, "compile": "default"}
        record = {"benchmark": benchmark, "settings": settings, "results": results, **SURROUNDINGS, **changes}
        path = bench / f"{file}.json"
        path.write_text(json.dumps(record), encoding="utf-8")
        return path

    return add


@pytest.fixture
def add_exploration(bench, exploration):
    """Save what two models make of two images."""

    def add(name="exploration"):
        path = bench / "explorer" / f"{name}.json"
        save_exploration(replace(exploration, credit="Images by nobody."), path, SURROUNDINGS)
        return path

    return add


@pytest.fixture(scope="session")
def octic():
    return small("quickvit_i8_tiny_patch16_224")


@pytest.fixture(scope="session")
def baseline():
    return small("baseline_tiny_patch16_224")


@pytest.fixture(scope="session")
def images():
    """Squares of random colours: no pose of them looks like another."""
    random = np.random.default_rng(0)
    return [
        Image.fromarray(random.integers(0, 256, (4, 4, 3), dtype=np.uint8).repeat(8, 0).repeat(8, 1))
        for _ in range(2)
    ]


@pytest.fixture(scope="session")
def exploration(octic, baseline, images):
    return explore(octic, baseline, images, CLASSES, [0, 1])
