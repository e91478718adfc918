"""The loop, with a recipe that has several modules, a teacher, and batches that can go wrong."""

import json
import math
import os
import shutil
import signal
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from quickvit import CheckpointError
from quickvit.train import (
    NonFinite,
    Recipe,
    RunConfig,
    Trainer,
    averaged_copy,
    build_optimizer,
    constant,
    cosine,
    follow,
    parameter_groups,
    read_capture,
    read_metrics,
    replay,
)
from quickvit.train.journal import Journal
from quickvit.train.signals import stop_requests


class Views(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Distillation(Recipe):
    """A student with dropout and its own head learns what its teacher, which follows it, says of another view."""

    name = "distillation"
    batch_type = Views

    def __init__(self, total_steps=12, bad_steps=(), **settings):
        self.total_steps, self.steps_per_epoch, self.batch_size = total_steps, 4, 8
        self.seed, self.clip, self.precision = 0, 0.5, "float32"
        self.bad_steps, self.given = bad_steps, settings
        torch.manual_seed(0)
        student = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.5))
        self.modules = {
            "student": student,
            "teacher": averaged_copy(student),
            "head": nn.Linear(16, 16),
        }
        self.momentum = cosine(0.9, 1.0, total_steps)
        self.decay = cosine(0.04, 0.4, total_steps)
        self.seen = []

    def settings(self):
        return self.given

    def optimizer(self):
        groups = parameter_groups(self.modules["student"], cosine(1e-2, 0.0, self.total_steps), 1.0)
        groups += parameter_groups(self.modules["head"], constant(1e-3), 0.0)
        for group in groups:
            if group["weight_decay"]:
                group["schedules"]["weight_decay"] = self.decay
        return build_optimizer("adamw", groups)

    def batches(self, start, world):
        for step in range(start, self.total_steps):
            generator = torch.Generator().manual_seed(step)
            batch = Views(*torch.randn(2, 8, 6, generator=generator))
            if step in self.bad_steps:
                batch.first[3, 2] = math.inf
            yield batch

    def loss(self, batch, step):
        student = self.modules["head"](self.modules["student"](batch.first))
        with torch.no_grad():
            teacher = self.modules["teacher"](batch.second)
        loss = functional.mse_loss(student, teacher)
        return loss, {"spread": student.std()}

    def after_step(self, step):
        follow(self.modules["teacher"], self.modules["student"], self.momentum(step))
        self.seen.append(step)

    def evaluate(self, world):
        assert not torch.is_grad_enabled()
        assert not any(module.training for module in self.modules.values())
        return {"weight": self.modules["teacher"][0].weight.sum().item()}


def state_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.state().items()}


@pytest.fixture
def run():
    return RunConfig(workers=0, log_every=1, save_every=4, keep=2)


def test_several_modules_and_a_teacher(run, tmp_path):
    recipe = Distillation()
    trainer = Trainer(recipe, run, tmp_path)
    outcome = trainer.fit()
    assert (outcome.steps, outcome.stopped) == (12, False)
    assert outcome.seconds > 0
    assert recipe.seen == list(range(12))
    assert [step for step, _ in outcome.evaluations] == [4, 8, 12]

    rows = read_metrics(tmp_path)
    logged = [row for row in rows if "loss" in row]
    assert [row["step"] for row in logged] == list(range(1, 13))
    assert set(logged[0]) == {
        *("step", "loss", "spread", "grad_norm/student", "grad_norm/head", "lr", "images_per_second")
    }
    assert [row["eval/weight"] for row in rows if "eval/weight" in row] == [
        numbers["weight"] for _, numbers in outcome.evaluations
    ]
    # The schedules are those of the last step, groups of one optimiser have their own.
    rates = {group["lr"] for group in trainer.optimizer.param_groups}
    assert rates == {cosine(1e-2, 0.0, 12)(11), 1e-3}
    assert max(group["weight_decay"] for group in trainer.optimizer.param_groups) == recipe.decay(11)
    names = set(trainer.state())
    assert {"modules.teacher.0.weight", "optimizer.head.weight.exp_avg"} < names
    assert not any(name.startswith("optimizer.teacher") for name in names)


def test_modules_are_clipped_one_by_one(run):
    trainer = Trainer(Distillation(), run)
    with stop_requests() as stop:
        batch = next(trainer.recipe.batches(0, trainer.world))
        big = Views(*(1000 * view for view in batch))
        trainer.optimizer.step = lambda: None
        trainer.optimizer.zero_grad = lambda: None
        metrics, _ = trainer.update(0, big, stop)
    for name in ("student", "head"):
        assert metrics[f"grad_norm/{name}"] > 0.5
        norm = torch.stack([p.grad.norm() for p in trainer.recipe.modules[name].parameters()]).norm()
        assert norm == pytest.approx(0.5, rel=1e-5)


def test_without_a_folder_nothing_is_written(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert Trainer(Distillation(), run).fit().steps == 12
    assert not list(tmp_path.iterdir())


def test_the_randomness_of_the_caller_is_left_alone(run):
    recipe = Distillation()
    state = torch.get_rng_state()
    Trainer(recipe, run).fit()
    assert torch.equal(torch.get_rng_state(), state)


def test_other_settings_are_refused(run, tmp_path):
    Trainer(Distillation(width=3, depth=2), run, tmp_path).fit()
    with pytest.raises(
        ValueError, match="asked for width 4 instead of 3, heads 1 instead of None; use another"
    ):
        Trainer(Distillation(width=4, depth=2, heads=1), run, tmp_path).fit()


def test_other_settings_are_what_is_said_of_a_run_whose_modules_differ_too(run, tmp_path):
    Trainer(Distillation(width=3), run, tmp_path).fit()
    other = Distillation(width=4)
    other.modules["head"] = nn.Linear(16, 16, bias=False)
    with pytest.raises(ValueError, match="asked for width 4 instead of 3; use another"):
        Trainer(other, run, tmp_path).fit()


@pytest.mark.parametrize("settings", [3, None, [["width", 3]]])
def test_settings_that_are_no_table_are_refused(run, tmp_path, settings):
    trainer = Trainer(Distillation(), run, tmp_path)
    trainer.store.begin(4, trainer.state(), {"recipe": "distillation", "settings": settings})
    assert trainer.store.settle()
    with pytest.raises(CheckpointError, match=r"step-00000004: its settings are no table but "):
        trainer.fit()


def test_settings_that_came_later_are_not_asked_of_an_earlier_run(run, tmp_path, monkeypatch):
    monkeypatch.setattr(Distillation, "later_settings", ("heads",))
    Trainer(Distillation(width=3), run, tmp_path).fit()
    assert Trainer(Distillation(width=3, heads=1), run, tmp_path).fit().steps == 12
    with pytest.raises(ValueError, match="asked for width 4 instead of 3; use another"):
        Trainer(Distillation(width=4, heads=1), run, tmp_path).fit()
    Trainer(Distillation(heads=1), run, tmp_path / "other").fit()
    with pytest.raises(ValueError, match="asked for heads 2 instead of 1; use another"):
        Trainer(Distillation(heads=2), run, tmp_path / "other").fit()


def test_a_run_of_other_modules_is_refused(run, tmp_path):
    Trainer(Distillation(), run, tmp_path).fit()
    other = Distillation()
    other.modules["head"] = nn.Linear(16, 16, bias=False)
    with pytest.raises(CheckpointError, match=r"it is of another run: it has also modules\.head\.bias"):
        Trainer(other, run, tmp_path).fit()


def test_metrics_of_updates_that_are_repeated_are_written_once(run, tmp_path):
    Trainer(Distillation(), run, tmp_path).fit()
    expected = [(row["step"], row.get("loss")) for row in read_metrics(tmp_path)]
    for path in (tmp_path / "checkpoints").glob("step-*12"):
        (path / "manifest.json").unlink()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 13, "lo')  # cut off by a kill
    Trainer(Distillation(), run, tmp_path).fit()
    assert [(row["step"], row.get("loss")) for row in read_metrics(tmp_path)] == expected


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_compiled_modules_learn_the_same(run, tmp_path):
    losses = []
    for mode in ("none", "default"):
        recipe = Distillation()
        recipe.modules["student"][2].p = 0.0  # drawn differently
        Trainer(recipe, replace(run, compile=mode), tmp_path / mode).fit()
        losses.append([row["loss"] for row in read_metrics(tmp_path / mode) if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize("passes", [1, 2, 4])
def test_cuda_graphs_may_use_their_memory_again(run, passes, monkeypatch):
    """Each pass begins a step, from which on all that the pass before left in a graph's memory is lost."""
    trainer = Trainer(Distillation(), replace(run, accumulate=passes))
    batch, trainer.graphs = next(trainer.recipe.batches(0, trainer.world)), True
    parameters = [
        *trainer.recipe.modules["student"].parameters(),
        *trainer.recipe.modules["head"].parameters(),
    ]
    left, steps = {}, []

    def leave(parameter):
        left.setdefault(parameter, parameter.grad)

    for p in parameters:
        p.register_post_accumulate_grad_hook(leave)

    def begin():
        steps.append(None)
        for gradient in left.values():
            gradient.fill_(math.nan)

    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", begin)
    torch.manual_seed(0)
    trainer.gradients(0, batch)
    assert len(steps) == passes
    assert len(left) == len(parameters)
    assert all(p.grad.isfinite().all() for p in parameters)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="TorchInductor needs a C++ compiler")
@pytest.mark.filterwarnings("ignore")
def test_evaluation_compiles_nothing(run, tmp_path):
    from torch._dynamo.utils import counters

    class Evaluated(Distillation):
        def evaluate(self, world):
            before = counters["frames"]["total"]
            assert before
            self.modules["student"](torch.randn(5, 6))
            assert counters["frames"]["total"] == before
            return {}

    outcome = Trainer(Evaluated(), replace(run, compile="default"), tmp_path).fit()
    assert len(outcome.evaluations) == 3


# ---------------------------------------------------------------------- stopping


def test_a_signal_ends_the_run_after_the_update(run, tmp_path):
    class Interrupted(Distillation):
        def after_step(self, step):
            super().after_step(step)
            if step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    handler = signal.getsignal(signal.SIGINT)
    outcome = Trainer(Interrupted(), run, tmp_path).fit()
    assert outcome.stopped
    # Agreed on in the update after the signal.
    assert outcome.steps == 7
    assert signal.getsignal(signal.SIGINT) == handler
    whole = Trainer(Distillation(), run)
    whole.fit()
    resumed = Trainer(Distillation(), run, tmp_path)
    assert resumed.fit().steps == 12
    for name, tensor in state_of(whole).items():
        assert torch.equal(resumed.state()[name], tensor), name


def test_a_stop_where_an_evaluation_was_due_leaves_it_to_the_next_process(run, tmp_path):
    class Interrupted(Distillation):
        def after_step(self, step):
            super().after_step(step)
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    outcome = Trainer(Interrupted(), run, tmp_path).fit()
    assert (outcome.steps, outcome.evaluations) == (4, [])
    assert [step for step, _ in Trainer(Distillation(), run, tmp_path).fit().evaluations] == [4, 8, 12]


def test_an_evaluation_that_fails_does_not_cost_the_updates_before_it(run, tmp_path):
    class Failing(Distillation):
        def evaluate(self, world):
            raise ArithmeticError("a mistake")

    trainer = Trainer(Failing(), run, tmp_path)
    with pytest.raises(ArithmeticError, match="a mistake"):
        trainer.fit()
    assert trainer.store.newest(trainer.state())[1].step == 4
    assert [step for step, _ in Trainer(Distillation(), run, tmp_path).fit().evaluations] == [4, 8, 12]


def test_data_that_cannot_be_used_are_refused_before_anything_else(run, tmp_path):
    class Refusing(Distillation):
        evaluates_first = True

        def batches(self, start, world):
            raise ValueError("no data")

        def evaluate(self, world):
            raise AssertionError("evaluated")

    begun = []
    with pytest.raises(ValueError, match="no data"):
        Trainer(Refusing(), run, tmp_path).fit(begins=begun.append)
    assert begun == []


def test_the_second_interrupt_is_immediate():
    with stop_requests() as stop:
        assert not stop
        os.kill(os.getpid(), signal.SIGINT)
        assert stop
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_signals_are_left_alone_in_other_threads():
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def inside():
        with stop_requests() as stop:
            seen.extend([bool(stop), signal.getsignal(signal.SIGTERM) == before])

    thread = threading.Thread(target=inside)
    thread.start()
    thread.join()
    assert seen == [False, True]


# ---------------------------------------------------------------------- what is not finite


def test_an_error_does_not_cost_the_checkpoint_that_is_being_written(run, tmp_path):
    class Failing(Distillation):
        def after_step(self, step):
            super().after_step(step)
            assert step < 4, "a mistake"

    trainer = Trainer(Failing(), run, tmp_path)
    with pytest.raises(AssertionError, match="a mistake"):
        trainer.fit()
    assert trainer.store.newest(trainer.state())[1].step == 4


def test_a_bad_batch_is_captured_and_replayed(run, tmp_path):
    recipe = Distillation(bad_steps=[5], width=3)
    trainer = Trainer(recipe, run, tmp_path)
    with pytest.raises(NonFinite, match=r"update 5 is not finite: loss (nan|inf), .*replay .*step-00000005"):
        trainer.fit()
    assert recipe.seen == list(range(5))
    capture = tmp_path / "captured" / "step-00000005"
    assert read_capture(capture)["settings"] == {"width": 3}
    captured = replay(Distillation(), capture)
    assert not captured.finite
    assert not math.isfinite(captured.metrics["loss"])
    assert captured.output == "student.0"
    assert "student.0.weight" in captured.gradients
    assert (captured.step, captured.rank) == (5, 0)

    # The weights were not touched, and the run is resumed from before.
    assert trainer.store.newest(trainer.state())[1].step == 4
    assert all(torch.isfinite(tensor).all() for tensor in trainer.state().values())


def test_replaying_gives_the_same_loss(run, tmp_path):
    """A batch that is only captured, with dropout and all."""
    trainer = Trainer(Distillation(), run, tmp_path)
    trainer.train_mode(True)
    trainer.optimizer.step = lambda: None
    batch = next(trainer.recipe.batches(0, trainer.world))
    with stop_requests() as stop:
        metrics, _ = trainer.update(0, batch, stop)
    with pytest.raises(NonFinite):
        trainer._capture(0, batch, metrics)
    captured = replay(Distillation(), tmp_path / "captured" / "step-00000000")
    assert captured.finite
    assert captured.metrics["loss"] == metrics["loss"].item()


def test_some_bad_updates_can_be_left_out(run, tmp_path, caplog):
    recipe = Distillation(bad_steps=[3, 7])
    run = RunConfig(workers=0, max_nonfinite=2, save_every=4)
    trainer = Trainer(recipe, run, tmp_path)
    assert trainer.fit().steps == 12
    assert recipe.seen == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    assert caplog.text.count("it is left out") == 2
    assert all(state["step"] == 10 for state in trainer.optimizer.state.values())


# ---------------------------------------------------------------------- disks and logs


def test_a_full_disk_does_not_stop_training(run, tmp_path, monkeypatch, caplog):
    from quickvit.train import checkpoint

    save_file = checkpoint.save_file

    def full(tensors, path, **options):
        if "00000004" in path or "00000008" in path:
            raise OSError(28, "No space left on device")
        save_file(tensors, path, **options)

    monkeypatch.setattr(checkpoint, "save_file", full)
    assert Trainer(Distillation(), run, tmp_path).fit().steps == 12
    assert caplog.text.count("No space left on device") == 2
    assert os.listdir(tmp_path / "checkpoints") == ["step-00000012"]


def test_the_last_checkpoint_is_not_optional(run, tmp_path, monkeypatch):
    from quickvit.train import checkpoint

    def full(*arguments, **options):
        raise OSError(28, "No space left on device")

    exported = []

    class Exporting(Distillation):
        def export(self, folder, world):
            exported.append(folder)

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(OSError, match="the last checkpoint could not be written to"):
        Trainer(Exporting(), run, tmp_path).fit()
    # But its result may fit where all of its state does not.
    assert exported == [tmp_path]


def test_metrics_that_are_no_numbers_are_still_json(tmp_path):
    with Journal(tmp_path) as journal:
        journal.evaluation(1, {"f1": math.nan, "loss": math.inf, "top1": 0.5})

    def refuse(word):
        raise AssertionError(word)

    for _ in range(2):
        (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
        found = json.loads(line, parse_constant=refuse)
        assert found == {"step": 1, "eval/f1": None, "eval/loss": None, "eval/top1": 0.5}
        (row,) = read_metrics(tmp_path)
        assert math.isnan(row["eval/f1"])
        assert row["eval/top1"] == 0.5
        # Resuming copies the lines.
        with Journal(tmp_path, start=1):
            pass


def test_tensorboard(run, tmp_path):
    pytest.importorskip("tensorboard")
    with Journal(tmp_path) as journal:
        journal.add_tensorboard()
        journal.evaluation(1, {"loss": 0.5})
    assert list((tmp_path / "tensorboard").glob("events*"))


def test_wandb_resumes_the_run_of_the_folder(tmp_path, monkeypatch):
    """And of no other folder, whose name may be the same."""
    calls = []
    fake = SimpleNamespace(
        init=lambda **options: (
            calls.append(options)
            or SimpleNamespace(
                log=lambda values, step: calls.append((step, values)), finish=lambda: calls.append("finish")
            )
        )
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    folders = tmp_path / "a" / "run", tmp_path / "b" / "run"
    for folder in (*folders, folders[0]):
        folder.mkdir(parents=True, exist_ok=True)
        with Journal(folder) as journal:
            journal.add_wandb("project", {"lr": 1})
            journal.evaluation(3, {"top1": 0.5})
    first, logged, end, other, _, _, again, _, _ = calls
    assert (first["project"], first["name"], first["resume"]) == ("project", "run", "allow")
    assert first["config"] == {"lr": 1}
    assert (logged, end) == ((3, {"eval/top1": 0.5}), "finish")
    assert first["id"] == again["id"] != other["id"]


@pytest.mark.parametrize(
    ("option", "module", "extra"),
    [({"tensorboard": True}, "torch.utils.tensorboard", "tensorboard"), ({"wandb": "p"}, "wandb", "wandb")],
)
def test_missing_extras_are_named(tmp_path, monkeypatch, option, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    trainer = Trainer(Distillation(), RunConfig(**option), tmp_path)
    with pytest.raises(ModuleNotFoundError, match=rf'pip install "quickvit\[{extra}\]"'):
        trainer.fit()


@pytest.mark.parametrize("steps", [9, 16])
def test_profile(tmp_path, steps):
    run = RunConfig(workers=0, profile=True)
    Trainer(Distillation(total_steps=steps), run, tmp_path).fit()
    trace = json.loads((tmp_path / "profile" / "rank-00000.json").read_text())
    assert any("AdamW" in event.get("name", "") for event in trace["traceEvents"])


def test_a_run_too_short_for_a_profile_says_so(tmp_path, caplog):
    Trainer(Distillation(total_steps=4), RunConfig(workers=0, profile=True), tmp_path).fit()
    assert "rank-00000.json: it begins after 8 updates" in caplog.text


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate": 0}, "accumulate must be at least 1, got 0"),
        ({"save_every": 0}, "save_every must be at least 1, got 0"),
        ({"workers": -1}, "workers must be at least 0, got -1"),
    ],
)
def test_wrong_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**settings)


@pytest.mark.parametrize(("cores", "workers"), [({0}, 1), ({0, 5}, 2), (set(range(64)), 4)])
def test_no_more_workers_than_cores(monkeypatch, cores, workers):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: cores, raising=False)
    assert RunConfig().workers == workers
    assert RunConfig(workers=9).workers == 9
