"""Training on a GPU: autocast, compilation, resuming."""

import os
import signal

import pytest
import tiny_runs
import torch

from quickvit.recipes.deit3 import Deit3, resolve
from quickvit.train import Trainer, World

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
@pytest.mark.parametrize("compile", ["none", "default", "reduce-overhead"])
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
    ours, theirs = (tiny_runs.metrics(tmp_path / name) for name in ("stopped", "whole"))
    assert len(ours) == len(theirs)
    for row, expected in zip(ours, theirs, strict=True):
        # The order of sums on a GPU is not fixed.
        if "loss" in expected:
            assert row["loss"] == pytest.approx(expected["loss"], rel=0.02), row["step"]


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
