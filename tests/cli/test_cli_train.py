"""`quickvit train`: options, configuration files, exit codes, replay, clusters."""

import json
import math
import re
import shlex
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from quickvit import load_checkpoint
from quickvit.recipes import deit3
from quickvit.train import Outcome, read_metrics, slurm


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (folder / "train" / label).mkdir(parents=True)
        for i in range(6):
            pixels = generator.integers(0, 256, (20, 20, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "train" / label / f"{i}.png")
    return folder


@pytest.fixture
def small(folder, tmp_path):
    """Options of a run that takes no time."""
    return [
        *("train", "deit3", "--model", "quickvit_h8_tiny_patch16_224", "--data", folder),
        *("--out", tmp_path / "run", "--img-size", 16, "--patch_size", 4, "--epochs", 2, "--batch-size", 4),
        *("--model_args.embed_dim", 32, "--model_args.depth", 2, "--model_args.num_heads", 2),
        *("--run.workers", 0, "--run.device", "cpu", "--run.log_every=1"),
    ]


@pytest.fixture
def seen(monkeypatch):
    """Replace training by noting its configuration."""
    from quickvit import recipes

    seen = []

    def note(config, command):
        seen.append((config, command))
        return Outcome(3, stopped=len(seen) == 2, evaluations=[], seconds=0.0)

    entry = recipes.RECIPES["deit3"]._replace(train=note)
    monkeypatch.setitem(recipes.RECIPES, "deit3", entry)
    return seen


def test_a_run_resumes_itself(run, small, tmp_path):
    assert run(*small)[0] == 0
    assert [row["step"] for row in read_metrics(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]
    assert load_checkpoint(tmp_path / "run" / "model.safetensors").config["num_classes"] == 2
    code, _, err = run(*small)
    assert code == 0
    assert "100%" in err
    starts = [json.loads(line) for line in (tmp_path / "run" / "starts.jsonl").read_text().splitlines()]
    assert len(starts) == 2
    assert starts[0]["command"].startswith("quickvit train deit3 --model quickvit_h8_tiny")
    assert {"commit", "versions", "hardware"} < set(starts[0])
    assert starts[0]["config"] == json.loads((tmp_path / "run" / "config.json").read_text())

    code, _, err = run(*small, "--learning-rate", "1e-4")
    assert code == 2
    assert "asked for learning_rate 0.0001 instead of 0.004; use another folder for another run" in err


def test_the_written_configuration_can_be_given_back(run, small, seen, tmp_path):
    written = deit3.resolve(_config(run, small, seen), torch.device("cpu"))
    (tmp_path / "config.json").write_text(json.dumps(deit3.as_plain(written)))
    assert _config(run, ["train", "deit3", "--config", tmp_path / "config.json"], seen[2:] or seen) == written


def _config(run, arguments, seen):
    code, _, err = run(*arguments)
    assert code in (0, 75), err
    return seen[-1][0]


def test_yaml_and_overrides(run, seen, tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "model: quickvit_i8_large_patch16_224\ndata: imagenet\nout: run\n"
        "learning_rate: 1e-3\nmodel_args: {depth: 6}\nrun: {workers: 8, parallel: fsdp}\n"
    )
    given = (
        "--run.workers",
        3,
        "--invariant",
        "polynomial",
        "--octic-depth",
        2,
        "--run.compile=reduce-overhead",
    )
    code, out, _ = run("train", "deit3", "--config", tmp_path / "recipe.yaml", *given)
    assert (code, out) == (0, "")
    ((config, command),) = seen
    assert (config.learning_rate, config.model_args, config.octic_depth) == (1e-3, {"depth": 6}, 2)
    assert (config.run.workers, config.run.parallel, config.run.compile) == (3, "fsdp", "reduce-overhead")
    assert config.invariant == "polynomial"
    assert config.epochs is None
    assert command.endswith("--run.compile=reduce-overhead")


def test_the_commands_of_the_training_page_are_understood(run, seen, tmp_path, monkeypatch):
    page = Path(__file__).parents[2] / "docs" / "training.md"
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text("model: quickvit_h8_tiny_patch16_224\ndata: digits\nout: run\n")
    monkeypatch.setattr(slurm, "submit", lambda work, config, folder: work() and SimpleNamespace(job_id="1"))
    commands = "".join(re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)).splitlines()
    for command in commands:
        _, _, arguments = command.partition("quickvit ")
        code, _, err = run(*shlex.split(arguments))
        assert code in (0, 75), err
    assert len(commands) == len(seen) == 10
    assert [config.octic_depth for config, _ in seen].count(4) == 1


def test_a_stopped_run_has_its_own_exit_code(run, small, seen):
    assert run(*small)[0] == 0
    assert run(*small)[0] == 75


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("leraning_rate: 1", "leraning_rate"),
        ("run: {workres: 1}", "workres"),
        ("epochs: many", "epochs"),
        ("lift: half", "lift"),
        ("model_args: {depth: {class_path: os.system}}", "model_args"),
        ("precision: fp4", "precision"),
        ("out: !!python/object/apply:os.system ['true']", "python/object"),
    ],
)
def test_wrong_configurations(run, small, tmp_path, capsys, text, message):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(SystemExit) as exit_info:
        run(*small, "--config", tmp_path / "recipe.yaml")
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (["--model", "quickvit_h8_tiny_patch61_224"], "did you mean"),
        (["--data", "nowhere"], "no data at 'nowhere'"),
        (["--batch-size", 13], "batch_size must be at most the 12 images"),
        (["--run.accumulate", 3], "a batch of 4 cannot be shared evenly"),
        (["--run.device", "abacus"], "cannot use the device 'abacus'"),
        (["--run.log_every", 0], "log_every must be at least 1, got 0"),
        (["--epochs", 0], "epochs must be at least 1, got 0"),
        (["--finetune", "nowhere.safetensors"], "no checkpoint at nowhere.safetensors"),
    ],
)
def test_wrong_values(run, small, changes, message):
    code, out, err = run(*small, *changes)
    assert (code, out) == (2, "")
    assert message in err


def test_a_bad_batch_is_captured_and_replayed(run, small, tmp_path, monkeypatch):
    bce_loss = deit3.bce_loss

    def sometimes(logits, targets):
        return bce_loss(logits, targets) * (math.inf if logits.requires_grad and len(losses) == 3 else 1)

    losses = []
    monkeypatch.setattr(deit3, "bce_loss", lambda *a: losses.append(sometimes(*a)) or losses[-1])
    code, _, err = run(*small)
    assert code == 1
    assert "update 3 is not finite: loss inf" in err
    monkeypatch.undo()
    capture = tmp_path / "run" / "captured" / "step-00000003"
    assert f"quickvit train replay {capture}" in err
    code, out, _ = run("train", "replay", capture, "--device", "cpu", "--json")
    result = json.loads(out)
    assert (code, result["finite"], result["step"], result["output"]) == (0, True, 3, None)

    def broken(logits, targets):
        return bce_loss(logits * math.nan, targets)

    monkeypatch.setattr(deit3, "bce_loss", broken)
    code, out, _ = run("train", "replay", capture, "--device", "cpu")
    assert code == 1
    assert "loss nan" in out
    assert "gradients that are not finite: model." in out

    (capture / "manifest.json").write_text("{}")
    code, _, err = run("train", "replay", capture)
    assert code == 2
    assert "its manifest is damaged or foreign" in err


def test_replaying_nothing(run, tmp_path):
    code, _, err = run("train", "replay", tmp_path / "nothing")
    assert code == 2
    assert "nothing is no captured update; those of a run are in RUN/captured" in err


def test_missing_extra(run, small, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    code, _, err = run(*small, "--run.wandb", "project")
    assert code == 2
    assert 'pip install "quickvit[wandb]"' in err
    monkeypatch.setitem(sys.modules, "submitit", None)
    code, _, err = run(*small, "--slurm.nodes", 2)
    assert code == 2
    assert 'pip install "quickvit[slurm]"' in err


class TestSlurm:
    def test_a_run_is_submitted(self, run, small, seen, tmp_path, monkeypatch):
        asked = {}

        class Executor:
            def __init__(self, folder, cluster):
                asked.update(folder=folder, cluster=cluster)

            def update_parameters(self, **parameters):
                asked.update(parameters)

            def submit(self, job):
                asked["job"] = job
                return SimpleNamespace(job_id="17")

        exported = []
        environment = SimpleNamespace(export=lambda **options: exported.append(options))
        helpers = SimpleNamespace(TorchDistributedEnvironment=lambda: environment)
        fake = SimpleNamespace(AutoExecutor=Executor, helpers=helpers)
        monkeypatch.setitem(sys.modules, "submitit", fake)
        code, out, _ = run(*small, "--slurm.nodes", 2, "--slurm.gpus", 4, "--slurm.hours", 1.5)
        assert (code, seen) == (0, [])
        assert out == f"submitted 17, logs in {tmp_path / 'run' / 'slurm'}\n"
        assert (asked["nodes"], asked["tasks_per_node"], asked["timeout_min"]) == (2, 4, 90)
        assert (asked["slurm_gpus_per_node"], asked["slurm_signal_delay_s"]) == (4, 180)

        calls = []
        monkeypatch.setattr(slurm.subprocess, "run", lambda command, **options: calls.append(command))
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("SLURM_JOB_ID", "17")
        assert asked["job"]() == 0
        assert calls == []
        assert asked["job"]() == 75  # stopped by a signal
        assert calls == [["scontrol", "requeue", "17"]]
        assert exported[0] == {"set_cuda_visible_devices": False, "overwrite": True}

    @pytest.mark.slow
    @pytest.mark.filterwarnings(
        "ignore::pytest.PytestUnraisableExceptionWarning"
    )  # submitit leaves its process
    def test_processes_on_this_machine(self, run, small, tmp_path):
        """submitit itself, with two processes that train together."""
        pytest.importorskip("submitit")
        code, out, _ = run(*small, "--slurm.nodes", 1, "--slurm.gpus", 2, "--slurm.cluster", "local")
        assert code == 0
        assert out.startswith("submitted ")
        deadline = time.monotonic() + 120
        while not (tmp_path / "run" / "model.safetensors").exists() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert len(read_metrics(tmp_path / "run")) == 6
