"""DinoBloom: from a checkpoint, on weighted folders, judged before and after."""

import json
import math

import numpy as np
import pytest
import tiny_runs
import torch
from PIL import Image

from quickvit import QuickVisionTransformer, load_checkpoint, save_checkpoint
from quickvit.cli import main
from quickvit.recipes import Dinobloom, DinobloomConfig
from quickvit.recipes.dinobloom import train
from quickvit.recipes.dinov2 import resolve
from quickvit.train import RunConfig, World, read_metrics

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cells(tmp_path_factory):
    """Two folders of images for training, one of them with classes and a test split."""
    folder = tmp_path_factory.mktemp("cells")
    generator = np.random.default_rng(0)
    for name, number in (("smears", 12), ("cells/train/dark", 8), ("cells/train/bright", 8)):
        _write(folder / name, number, generator)
    for label in ("dark", "bright"):
        _write(folder / "cells" / "test" / label, 4, generator)
    return folder


def _write(place, number, generator):
    place.mkdir(parents=True)
    for i in range(number):
        low = 150 if place.name == "bright" else 0
        pixels = generator.integers(low, low + 100, (20, 24, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{i}.png")


@pytest.fixture(scope="module")
def backbone(tmp_path_factory):
    path = tmp_path_factory.mktemp("backbone") / "backbone.safetensors"
    options = {"img_size": 16, "patch_size": 4, "num_classes": 0, "init_values": 0.1, "family": "i8"}
    torch.manual_seed(0)
    save_checkpoint(QuickVisionTransformer(**options, **tiny_runs.MODEL), path)
    return path


def command(cells, backbone, out):
    data = json.dumps({str(cells / "cells"): 2, str(cells / "smears"): 1})
    options = {
        "model": "quickvit_i8_tiny_patch16_224",
        "finetune": backbone,
        "data": data,
        "labelled": cells / "cells",
        "out": out,
        "img-size": 16,
        "patch-size": 4,
        "steps": 4,
        "batch-size": 8,
        "prototypes": 24,
        "head-hidden": 32,
        "head-bottleneck": 16,
        "model-args": json.dumps(tiny_runs.MODEL),
        "run.workers": 0,
        "run.device": "cpu",
        "run.log-every": 1,
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    return ["train", "dinobloom", *words]


def test_the_command(cells, backbone, tmp_path, capsys):
    out = tmp_path / "run"
    assert main(command(cells, backbone, out)) == 0, capsys.readouterr().err
    rows = read_metrics(out)
    judged = {row["step"]: row for row in rows if "eval/logistic/weighted_f1" in row}
    # Before and after.
    assert set(judged) == {0, 4}
    names = {
        f"eval/{a}/{s}"
        for a in ("1-NN", "logistic")
        for s in ("accuracy", "balanced_accuracy", "weighted_f1")
    }
    assert all(names <= set(row) for row in judged.values())
    # Dark and bright are easy to tell apart, even before.
    assert judged[0]["eval/logistic/accuracy"] == 1
    first = load_checkpoint(out / "teachers" / "step-00000000.safetensors")
    start = load_checkpoint(backbone)
    assert torch.equal(first.patch_embed.weight, start.patch_embed.weight)
    last = load_checkpoint(out / "model.safetensors")
    assert not torch.equal(last.blocks[0].attn.qkv.weight_1, start.blocks[0].attn.qkv.weight_1)
    assert last.pretrained_cfg["crop_mode"] == "squash"


def test_squeezed_images_are_cropped_by_the_device(cells, backbone, tmp_path, capsys):
    """Whatever their sizes were, those of local views too."""
    words = ("--crops", "device", "--local-views", "2", "--local-size", "8", "--cache", "true")
    assert main([*command(cells, backbone, tmp_path / "run"), *words]) == 0, capsys.readouterr().err
    assert all(math.isfinite(value) for row in read_metrics(tmp_path / "run") for value in row.values())


def config(cells, backbone, **changes):
    values = {"model": "quickvit_i8_large_patch16_224", "finetune": backbone, "out": "run", **changes}
    return DinobloomConfig(data={str(cells / "cells"): 2.0, str(cells / "smears"): 1.0}, **values)


def test_the_values_are_those_of_dinobloom(cells):
    resolved = resolve(config(cells, None), CPU)
    assert (resolved.steps, resolved.learning_rate, resolved.local_views) == (4000, 2e-4, 0)
    assert (resolved.momentum, resolved.layer_decay, resolved.final_weight_decay) == (0.994, 1.0, 0.2)
    assert (resolved.centering, resolved.prototypes, resolved.batch_size) == ("sinkhorn", 65536, 320)
    assert resolved.views == "dinobloom"
    assert resolved.run.evaluate_every == 4000
    sizes = {"preset": "small", "model": "quickvit_i8_small_patch16_224"}
    small = resolve(config(cells, None, **sizes), CPU)
    assert (small.steps, small.learning_rate) == (4000, 2e-4)
    assert small.prototypes < 65536
    assert small.group == 64
    assert resolve(config(cells, None, **sizes, batch_size=320), CPU).group == 64


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_the_defaults_are_for_eight_gpus_and_fewer(cells, backbone, ranks):
    small = {
        "model": "quickvit_i8_tiny_patch16_224",
        "img_size": 16,
        "patch_size": 4,
        "model_args": tiny_runs.MODEL,
        "prototypes": 24,
    }
    resolved = resolve(config(cells, backbone, **small), CPU)
    assert (resolved.batch_size, resolved.group) == (320, 40)
    Dinobloom(resolved).batches(0, World(size=ranks))


def test_batches_are_mixed_by_weight(cells, backbone):
    small = {
        "model": "quickvit_i8_tiny_patch16_224",
        "img_size": 16,
        "patch_size": 4,
        "model_args": tiny_runs.MODEL,
    }
    resolved = resolve(
        config(cells, backbone, batch_size=8, steps=60, prototypes=24, run=RunConfig(workers=0), **small), CPU
    )
    recipe = Dinobloom(resolved)
    batches = list(recipe.batches(0, World()))
    indices = torch.cat([batch.indices for batch in batches])
    # Two thirds of what is seen are cells: 24 of 36 places.
    assert (indices < 24).double().mean().item() == pytest.approx(2 / 3, abs=0.05)
    assert batches[0].local_views.shape[:2] == (8, 0)


def test_there_must_be_something_to_fine_tune(cells):
    with pytest.raises(ValueError, match="give its checkpoint with --finetune"):
        train(config(cells, None))
