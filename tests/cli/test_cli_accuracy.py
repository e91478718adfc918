"""`quickvit eval accuracy` and `rotation`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import timm
import torch

import quickvit
from quickvit import QuickVisionTransformer, save_checkpoint
from quickvit.data import open_source, preprocessing
from quickvit.evaluate import Pose, measure_accuracy
from quickvit.recipes.deit3 import Deit3, Deit3Config, resolve
from quickvit.testing import randomize
from quickvit.train import World

OPTIONS = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 10}


@pytest.fixture(scope="module")
def classifiers(tmp_path_factory):
    """Checkpoints of an i8 and of an h8 that know ten classes."""
    folder = tmp_path_factory.mktemp("classifiers")
    for family in ("i8", "h8"):
        model = randomize(QuickVisionTransformer(family=family, **OPTIONS), 0)
        save_checkpoint(model, folder / f"{family}.safetensors")
    return folder


def test_accuracy_is_what_was_measured(run, classifiers):
    file = classifiers / "h8.safetensors"
    options = ("--rotate", "random90", "--mirror", "--circle", "--seed", 3, "--batch-size", 100)
    code, out, _ = run("eval", "accuracy", file, *options, "--json")
    result = json.loads(out)
    assert result["protocol"] == "accuracy"
    model = quickvit.load_checkpoint(file)
    pose = Pose("quarter", mirror=True)
    expected = measure_accuracy(
        model, open_source("digits", "val"), preprocessing(model), (pose,), circle=True, seed=3
    )
    assert code == 0
    assert result["images"] == 360
    assert result["unreadable"] == {}
    assert result["preprocessing"]["img_size"] == [32, 32]
    row = expected.rows[0]
    assert result["rows"] == [
        {"pose": "mirrored random quarter turn", "top1": 100 * row.top1, "top5": 100 * row.top5}
    ]
    code, out, _ = run("eval", "accuracy", file, "--split", "train")
    lines = out.splitlines()
    assert lines[0].split() == ["pose", "top-1", "(%)", "top-5", "(%)"]
    assert lines[-1] == "1437 images; 0 could not be read"


def test_an_invariant_model_loses_exactly_nothing(run, classifiers):
    code, out, _ = run("eval", "rotation", classifiers / "i8.safetensors", "--json")
    rows = {row.pop("pose"): row for row in json.loads(out)["rows"]}
    assert code == 0
    for pose in ("90°", "180°", "270°", "mirrored", "random quarter turn"):
        assert rows[pose] == {**rows["upright"], "top1_change": 0.0, "top5_change": 0.0}
    code, out, _ = run("eval", "rotation", classifiers / "h8.safetensors")
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["pose", "top-1", "(%)", "change", "top-5", "(%)", "change"]
    assert len(lines) == 2 + 8 + 2
    assert any(line.split()[-1] not in ("+0.00", "-0.00") for line in lines[3:10])


@pytest.mark.parametrize("protocol", ["accuracy", "rotation"])
def test_random_weights_are_told_and_always_the_same(run, monkeypatch, protocol):
    seen = []

    def measure(model, *_, **__):
        seen.append(model.head.weight)
        raise ValueError("that is enough")

    monkeypatch.setattr("quickvit.cli.accuracy.measure_accuracy", measure)
    for _ in range(2):
        code, _, err = run("eval", protocol, "quickvit_i8_tiny_patch16_224")
        assert code == 2
        assert "quickvit: no --checkpoint given, the weights are random\n" in err
    assert torch.equal(*seen)


def test_a_run_is_a_folder_with_its_model(run, classifiers, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "model.safetensors").write_bytes((classifiers / "i8.safetensors").read_bytes())
    results = [
        json.loads(run("eval", "accuracy", path, "--json")[1])["rows"]
        for path in (tmp_path / "run", classifiers / "i8.safetensors")
    ]
    assert results[0] == results[1]


@pytest.mark.parametrize("average", [None, 0.9])
def test_a_run_of_the_baseline_is_rebuilt(run, tmp_path, average):
    options = {"img_size": 32, "batch_size": 100, "crop_ratio": 0.9, "model_args": {"depth": 1}}
    config = Deit3Config("baseline_tiny_patch16_224", "digits", tmp_path, average=average, **options)
    config = resolve(config, torch.device("cpu"))
    recipe = Deit3(config)
    model = randomize(recipe.modules["average" if average else "model"], 3)
    recipe.export(tmp_path, World())
    code, out, _ = run("eval", "accuracy", tmp_path, "--json")
    expected = measure_accuracy(model, open_source("digits", "val"), preprocessing(model))
    assert code == 0
    assert json.loads(out)["rows"][0]["top1"] == 100 * expected.rows[0].top1
    assert json.loads(out)["preprocessing"]["crop_ratio"] == 0.9
    other = ("eval", "accuracy", "baseline_small_patch16_224", "--checkpoint", tmp_path / "model.safetensors")
    code, _, err = run(*other)
    assert code == 2
    assert "is not a baseline_small_patch16_224: standard baseline_tiny_patch16_224 instead of" in err


def test_weights_without_a_description_need_a_name(run, tmp_path):
    file = tmp_path / "vit.pth"
    torch.save(timm.create_model("vit_tiny_patch16_224").state_dict(), file)
    code, _, err = run("eval", "accuracy", file)
    assert code == 2
    assert f"{file} does not say which model it is; give the name of the model, and the file with" in err
    code, _, err = run("eval", "accuracy", "vit_tiny_patch16_224", "--checkpoint", file)
    assert code == 2
    assert "the model's outputs are (1000,), expected one for each of the 10 classes of the data" in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rotate", "up"), "--rotate takes degrees, random or random90; got 'up'"),
        (("--rotate", "inf"), "--rotate takes degrees"),
        (("--data", "/nowhere"), "no data at '/nowhere': expected a folder"),
        (("--split", "dev"), "unknown split 'dev'"),
        (("--batch-size", "0"), "batch_size must be at least 1, got 0"),
        (("--device", "gpu"), "cannot use the device 'gpu'"),
    ],
)
def test_wrong_arguments_are_named(run, classifiers, arguments, message):
    code, out, err = run("eval", "accuracy", classifiers / "i8.safetensors", *arguments)
    assert (code, out) == (2, "")
    assert message in err


def test_processes_count_every_image_once(classifiers, run):
    file = str(classifiers / "h8.safetensors")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "quickvit", "eval", "rotation", file, "--json", "--batch-size", "33", "--device", "cpu"]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(quickvit.__file__).parents[1]),
    }
    result = subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, timeout=300, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    both, alone = json.loads(result.stdout), json.loads(run("eval", "rotation", file, "--json")[1])
    assert (both["images"], both["rows"]) == (alone["images"], alone["rows"])
