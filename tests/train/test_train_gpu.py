"""Training on a GPU: autocast, compilation, resuming."""

import os
import signal

import pytest
import tiny_runs
import torch

from quickvit.recipes.deit3 import Deit3, resolve
from quickvit.recipes.dinov2 import Dinov2
from quickvit.recipes.dinov2 import resolve as resolve_views
from quickvit.train import Trainer, World, read_metrics

pytestmark = [
    pytest.mark.gpu,
    # The compiler and the profiler warn about themselves.
    pytest.mark.filterwarnings("default"),
]
DEVICE = torch.device("cuda", 0)


class Interrupted(Deit3):
    """Asks itself to stop."""

    def after_step(self, step):
        super().after_step(step)
        if step == 5:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
@pytest.mark.parametrize("compile", ["none", "default", "reduce-overhead", "blocks"])
def test_a_run_and_its_continuation(images, tmp_path, compile, optimizer):
    def trainer(kind, out):
        changes = {"optimizer": optimizer, "model_args": {"embed_dim": 128, "depth": 4, "num_heads": 2}}
        config = tiny_runs.config(images, out, {"compile": compile}, **changes)
        config = resolve(config, DEVICE)
        assert config.precision == "bf16"
        return Trainer(kind(config), config.run, out, World(device=DEVICE))

    whole = trainer(Deit3, tmp_path / "whole").fit()
    assert whole.steps == 15
    stopped = trainer(Interrupted, tmp_path / "stopped").fit()
    assert stopped.stopped
    assert 5 < stopped.steps < 15
    assert trainer(Deit3, tmp_path / "stopped").fit().steps == 15
    assert all(0 < row["memory_mib"] < 10_000 for row in read_metrics(tmp_path / "whole") if "loss" in row)
    ours, theirs = (tiny_runs.metrics(tmp_path / name) for name in ("stopped", "whole"))
    assert len(ours) == len(theirs)
    for row, expected in zip(ours, theirs, strict=True):
        # The order of sums on a GPU is not fixed.
        if "loss" in expected:
            assert row["loss"] == pytest.approx(expected["loss"], rel=0.02), row["step"]


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("recipe", [Deit3, Dinov2])
def test_cuda_graphs_learn_the_same(images, tmp_path, recipe, accumulate):
    """Also where a module runs several times before its gradients are used."""
    losses = []
    for compile in ("none", "reduce-overhead", "blocks"):
        make, prepare = {Deit3: (tiny_runs.config, resolve), Dinov2: (tiny_runs.views_config, resolve_views)}[
            recipe
        ]
        # Compiled code draws other random numbers.
        changes = {"drop_path": 0.0, "model_args": {"embed_dim": 128, "depth": 4, "num_heads": 2}}
        run = {"compile": compile, "accumulate": accumulate, "evaluate_every": 5}
        out = tmp_path / compile
        config = prepare(make(images, out, run, **changes), DEVICE)
        Trainer(recipe(config), config.run, out, World(device=DEVICE)).fit()
        losses.append([row["loss"] for row in read_metrics(out) if "loss" in row])
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert losses[2] == pytest.approx(losses[0], rel=0.03)


def test_lamb_costs_few_launches(images, tmp_path):
    """Hundreds of small tensors, and no launch for each."""
    config = resolve(
        tiny_runs.config(images, tmp_path, model_args={"embed_dim": 64, "depth": 24, "num_heads": 2}), DEVICE
    )
    trainer = Trainer(Deit3(config), config.run, world=World(device=DEVICE))
    for p in trainer.recipe.modules["model"].parameters():
        p.grad = torch.randn_like(p)
    trainer.optimizer.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        trainer.optimizer.step()
        torch.cuda.synchronize()
    launches = sum(event.count for event in profiler.key_averages())
    assert launches < len(trainer.optimizer.state)
