"""Several processes compute what one does, and can take over from each other."""

import os
import shutil
import signal
import time
from dataclasses import replace

import pytest
import tiny_runs
import torch

EPOCHS = 4  # of 5 steps
QUICK, STANDARD = "quickvit_i8_tiny_patch16_224", "baseline_tiny_patch16_224"
MIRRORED = "quickvit_h2_tiny_patch16_224"


@pytest.fixture(scope="module")
def config(images, tmp_path_factory):
    """Runs in double precision and without stochastic depth, which every rank draws for itself."""

    def build(run=None, **changes):
        values = {"model": QUICK, "precision": "float64", "drop_path": 0.0, "epochs": EPOCHS, **changes}
        return tiny_runs.config(images, tmp_path_factory.mktemp("runs") / "run", run, **values)

    return build


@pytest.fixture(scope="module")
def alone(config):
    """The folder of a run of one process, for a model and a batch size."""
    done = {}

    def run(**changes):
        key = tuple(changes.items())
        if key not in done:
            chosen = config(**changes)
            assert tiny_runs.run(chosen) == 0
            done[key] = chosen.out
        return done[key]

    return run


def assert_close_run(out, expected):
    ours, theirs = tiny_runs.metrics(out), tiny_runs.metrics(expected)
    assert len(ours) == len(theirs) >= 6 * EPOCHS
    for row, reference in zip(ours, theirs, strict=True):
        assert row.keys() == reference.keys()
        for name, value in reference.items():
            assert row[name] == pytest.approx(value, rel=1e-10, abs=1e-10), (name, row["step"])
    ours, theirs = (tiny_runs.tensors(folder / "model.safetensors") for folder in (out, expected))
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("size", "run", "changes"),
    [
        (2, {"parallel": "ddp"}, {"model": QUICK}),
        (2, {"parallel": "fsdp", "accumulate": 2}, {"model": QUICK}),
        (2, {"parallel": "ddp", "accumulate": 2}, {"model": STANDARD}),
        (2, {"parallel": "fsdp"}, {"model": STANDARD}),
        # Its group has no two-dimensional irreps.
        (2, {"parallel": "fsdp"}, {"model": MIRRORED}),
        # Three ranks share few axes evenly, and some have no part of some tensors.
        (3, {"parallel": "fsdp"}, {"model": QUICK, "batch_size": 6}),
    ],
    ids=lambda value: value["parallel"] if isinstance(value, dict) and "parallel" in value else "",
)
def test_several_ranks_compute_what_one_does(alone, config, size, run, changes):
    chosen = config(run, **changes)
    tiny_runs.run_ranks(chosen, size)
    assert_close_run(chosen.out, alone(**changes))


def test_accumulated_gradients(alone, config):
    chosen = config({"accumulate": 4})
    assert tiny_runs.run(chosen) == 0
    assert_close_run(chosen.out, alone(model=QUICK))


def stopped_after(chosen, size, step):
    """Train with so many processes until they have logged a step, and stop them by a signal to the last one."""
    group = tiny_runs.start_ranks(chosen, size)
    while tiny_runs.last_step(chosen.out) < step and all(process.is_alive() for process in group):
        time.sleep(0.002)
    os.kill(group[-1].pid, signal.SIGTERM)
    for process in group:
        process.join(120)
        assert tiny_runs.finished(process, chosen) == 75
    assert tiny_runs.last_step(chosen.out) < 5 * EPOCHS


@pytest.mark.parametrize(("parallel", "first", "second"), [("fsdp", 2, 1), ("fsdp", 1, 2), ("ddp", 2, 1)])
def test_resumed_by_another_number_of_ranks(alone, config, parallel, first, second):
    chosen = config({"parallel": parallel})
    stopped_after(chosen, first, 4)
    if (parallel, first) == ("fsdp", 2):
        (saved,) = (chosen.out / "checkpoints").glob(f"step-*{tiny_runs.last_step(chosen.out)}")
        sizes = [file.stat().st_size for file in sorted(saved.glob("rank-*"))]
        assert len(sizes) == 2
        assert min(sizes) > 0.7 * max(sizes)  # both have their part
    tiny_runs.run_ranks(chosen, second)
    assert_close_run(chosen.out, alone(model=QUICK))


def test_an_evaluation_that_fails_on_one_rank_does_not_cost_the_updates_before_it(config, images, tmp_path):
    shutil.copytree(images, tmp_path / "images")
    (tmp_path / "images" / "val" / "class2" / "2.png").write_bytes(b"no image")
    chosen = replace(config({"save_every": 5}), data=str(tmp_path / "images"))
    for process in tiny_runs.start_ranks(chosen, 2):
        process.join(120)
        assert process.exitcode not in (0, None)
    assert [path.name for path in (chosen.out / "checkpoints").iterdir()] == ["step-00000005"]


def test_a_batch_that_cannot_be_shared(config, monkeypatch):
    from quickvit.recipes.deit3 import Deit3, resolve
    from quickvit.train import Trainer, World

    recipe = Deit3(resolve(config(), torch.device("cpu")))
    with pytest.raises(
        ValueError, match="a batch of 8 cannot be shared evenly by 3 ranks with 1 backward passes"
    ):
        Trainer(recipe, config().run, world=World(0, 3))
