"""The study: what is run, what is recorded, what goes on after an interruption."""

import importlib.util
import json
import os
import re
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quickvit.__main__ import main
from quickvit.report.results import read_results
from quickvit.report.tables.frozen import frozen_features

FOLDER = Path(__file__).parent.parent / "benchmarks/study"
TINY = (
    *(
        "--extra",
        "--img-size=16",
        "--patch-size=4",
        "--batch-size=8",
        "--run.evaluate-every=2",
        "--run.save-every=2",
    ),
    '--model-args={"embed_dim": 32, "depth": 2, "num_heads": 2}',
)
# In place of quickvit: training that is killed the first time, and prints its command line the second.
FAKE = """
import json, pathlib, signal, sys, time
folder = pathlib.Path(next(word for word in sys.argv if word.startswith("--out=")).removeprefix("--out="))
begun = folder / "begun"
if sys.argv[1] == "train" and not begun.exists():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
    begun.touch()
    time.sleep(60)
print(json.dumps(sys.argv[1:]))
"""


def script(name):
    """One of the study's scripts, as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


@pytest.fixture
def study():
    yield from script("study")


@pytest.fixture
def recording(study):
    yield from script("record")


@pytest.fixture
def data(tmp_path):
    """A folder of two classes, one dark and one light."""
    generator = np.random.default_rng(0)
    for split, count in (("train", 12), ("test", 4)):
        for label in range(2):
            folder = tmp_path / "data" / split / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = generator.integers(120 * label, 120 * label + 100, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return tmp_path / "data"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--studies", "depth", "familes"), "--studies of cifar10 are depth, families, .*, got familes"),
        (("--studies", "dinov2"), "--studies of cifar10 are .*, got dinov2"),
        (("--families", "h9"), "--families of cifar10 are d8, h2, h8, i8, vit, got h9"),
    ],
)
def test_names_that_do_not_exist(study, tmp_path, capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        call(study, tmp_path, *options)
    assert stopped.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def call(study, tmp_path, *options, dataset="cifar10", data="DATA"):
    places = ("--data", str(data), "--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results"))
    return study.main([dataset, *places, "--seeds", "0", "--jobs", "1", "--workers", "0", *options])


def test_every_run_has_its_place(study):
    for dataset in study.SUPERVISED:
        every = list(study.runs(dataset, 0))
        assert len({run.name for run in every}) == len(every)
        labels = [label for run in every for label in run.labels.items()]
        assert len(set(labels)) == len(labels)
    studies = {study for study, _ in labels}
    assert studies == {"families", "depth", "invariants", "lift", "initialisation", "norm", "dinov2"}
    assert [name for study, name in labels if study == "dinov2"] == ["vit", "h8", "i8"]


def test_what_is_interrupted_goes_on_and_what_is_done_is_left_alone(study, tmp_path, monkeypatch, capfd):
    fake = tmp_path / "fake.py"
    fake.write_text(FAKE)
    monkeypatch.setattr(study, "QUICKVIT", (sys.executable, str(fake)))
    # It is trained, but not tested.
    steps = study.Job._steps
    monkeypatch.setattr(study.Job, "_steps", lambda job: iter([next(steps(job))]))
    monkeypatch.setattr(
        study, "result", lambda folder, run: {"seed": run.seed, "poses": [{"pose": "upright"}]}
    )
    chosen = ("--studies", "families", "--families", "vit")
    begun, sleep = tmp_path / "runs/families-vit-0/begun", time.sleep

    def wait(seconds):
        while not begun.exists():
            sleep(seconds)

    with monkeypatch.context() as patched:
        patched.setattr(study.time, "sleep", wait)
        assert call(study, tmp_path, *chosen, "--minutes", "0.01") == 75
    assert "1 interrupted, 0 not begun" in capfd.readouterr().out
    assert not (tmp_path / "results").exists()

    assert call(study, tmp_path, *chosen) == 0
    file = tmp_path / "results/cifar10-families/vit-0.json"
    assert json.loads(file.read_text())["name"] == "vit"
    words = json.loads((tmp_path / "runs/families-vit-0/train.log").read_text())
    assert words[:3] == ["train", "deit3", "--model=baseline_tiny_patch16_224"]
    assert {"--data=DATA", "--seed=0", "--crops=device", "--epochs=20"} <= set(words)

    file.write_text("done")
    begun.unlink()
    assert call(study, tmp_path, *chosen) == 0
    assert file.read_text() == "done"


def test_a_run_that_fails_has_no_result(study, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(study, "QUICKVIT", (sys.executable, "-c", "raise SystemExit(2)"))
    assert call(study, tmp_path, "--studies", "lift") == os.EX_SOFTWARE
    assert "lift-free-0: stopped with code 2" in capfd.readouterr().out
    assert not (tmp_path / "results").exists()


def test_the_main_comparison_comes_first_with_all_its_seeds(study, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(study, "QUICKVIT", (sys.executable, "-c", "raise SystemExit(2)"))
    call(study, tmp_path, "--studies", "families", "lift", "--seeds", "0", "1")
    names = [line.split(":")[0] for line in capfd.readouterr().out.splitlines()]
    families = [f"families-{name}-{seed}" for seed in (0, 1) for name in ("vit", "h8", "i8", "d8", "h2")]
    assert names == [*families, "lift-free-0", "lift-free-1"]


def test_a_classifier(study, tmp_path, data):
    chosen = ("--studies", "families", "--families", "i8")
    assert call(study, tmp_path, *chosen, *TINY, "--epochs=2", "--warmup-epochs=1", data=data) == 0
    (families,) = read_results(tmp_path, tmp_path / "results").study("families")
    assert (families.dataset, families.name, families.seed) == ("cifar10", "i8", 0)
    assert families.score("top1") == families.score("top1", "random quarter turn")
    assert len(families.curve) >= 2
    assert families.gmacs > 0
    assert families.images_per_s > 0
    (same,) = read_results(tmp_path, tmp_path / "results").study("invariants")
    assert same.name == "power_spectrum"
    record = json.loads((tmp_path / "results/cifar10-families/i8-0.json").read_text())
    assert record["training"]["memory_mib"] is None
    assert record["provenance"]["command"].startswith("quickvit train deit3 ")


@pytest.mark.slow
def test_self_supervision(study, tmp_path, data):
    options = (*TINY, "--local-size=8", "--steps=4", "--prototypes=24", "--group=2")
    chosen = ("--studies", "dinov2", "--families", "h8")
    assert call(study, tmp_path, *chosen, *options, dataset="pbc_blood_96", data=data) == 0
    (run,) = read_results(tmp_path, tmp_path / "results").study("dinov2")
    assert (run.dataset, run.name) == ("pbc_blood_96", "h8")
    assert {"1-NN", "20-NN", "logistic"} <= set(run.answers())
    assert [step for step, _ in run.progress] == [0, 2, 4]
    assert run.score("20-NN") is not None
    record = json.loads((tmp_path / "results/pbc_blood_96-dinov2/h8-0.json").read_text())
    assert record["progress"][-1]["poses"] == record["poses"]
    assert record["training"] | {"recipe": "dinov2", "steps": 4} == record["training"]


@pytest.fixture
def trained(tmp_path, data):
    """A run folder of a tiny i8 with the polynomial invariant."""
    folder = tmp_path / "run"
    options = (f"--data={data}", f"--out={folder}", "--epochs=1", "--warmup-epochs=0", "--run.workers=0")
    model = ("--model=quickvit_i8_large_patch16_224", "--invariant=polynomial", *TINY[1:4], TINY[-1])
    assert main(["train", "deit3", *model, *options]) == 0
    return folder


def test_runs_of_the_papers_scale_are_tested_and_written_down(recording, trained, tmp_path, data):
    recording.main([str(trained), "--imagenet", str(data), "--results", str(tmp_path / "results")])
    (run,) = read_results(tmp_path, tmp_path / "results").study("families", "imagenet-large")
    assert (run.name, run.seed, run.model) == ("i8", 0, "quickvit_i8_large_patch16_224")
    assert run.options[0] == "--invariant=polynomial"
    assert run.score("top1") == run.score("top1", "random quarter turn")
    with pytest.raises(ValueError, match="a classifier, which is tested on --imagenet alone"):
        recording.main([str(trained), "--ade20k", str(data), "--results", str(tmp_path / "results")])


def test_frozen_features_are_written_down_by_data_set(recording, trained, tmp_path, monkeypatch):
    asked = []

    def answers(*command):
        asked.append(command)
        return {f"{place} {name}": 0.5 for place in ("imagenet", "ade20k") for name in ("linear", "knn")}

    about = recording.about
    monkeypatch.setattr(recording, "answers", answers)
    monkeypatch.setattr(recording, "about", lambda folder: about(folder) | {"training": {"recipe": "dinov2"}})
    places = ("--imagenet", "A", "--ade20k", "B")
    recording.main([str(trained), *places, "--results", str(tmp_path / "results"), "--extra", "--workers=4"])
    assert asked == [("all", str(trained), "--imagenet=A", "--ade20k=B", "--workers=4")]
    table = frozen_features(read_results(tmp_path, tmp_path / "results"))
    found = [row for row in table.rows if row[:2] == ("ViT-Large/16", "i8") and "50.00" in row]
    assert {row[2] for row in found} == {"ImageNet-1K", "ADE20K"}
