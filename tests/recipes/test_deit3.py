"""DeiT III: the paper's values, the loss, models and their ablations, fine-tuning, what is exported."""

import io
import logging
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from timm.layers import DropPath
from timm.loss import BinaryCrossEntropy

from quickvit import CheckpointError, QuickVisionTransformer, load_checkpoint, save_checkpoint
from quickvit.data import Mixing, TooManyUnreadable
from quickvit.data.preprocessing import preprocessing
from quickvit.models import create_model
from quickvit.models.checkpoints import read_checkpoint, save_weights
from quickvit.models.standard import restore_any, standard_config
from quickvit.recipes import Deit3, Deit3Config
from quickvit.recipes.deit3 import bce_loss, build_model, resolve, train
from quickvit.testing import randomize
from quickvit.train import RunConfig, World, read_metrics

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SMALL = {"embed_dim": 32, "depth": 2, "num_heads": 2}


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in range(6):
            place = folder / split / str(label)
            place.mkdir(parents=True)
            for i in range(3):
                pixels = generator.integers(40 * label, 40 * label + 50, (20, 20, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    return folder


@pytest.fixture
def config(images, tmp_path):
    """A configuration for small images, trained for two short epochs."""
    return Deit3Config(
        model="quickvit_i8_tiny_patch16_224",
        data=str(images),
        out=tmp_path / "run",
        img_size=16,
        patch_size=4,
        model_args=SMALL,
        epochs=2,
        warmup_epochs=1,
        batch_size=6,
        run=RunConfig(workers=0, device="cpu"),
    )


@pytest.fixture
def weights(tmp_path):
    """A file of weights that does not say what model they are of."""
    save_weights({"blocks.0.ls1.gamma": torch.ones(8)}, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


@pytest.fixture
def shards(tmp_path):
    """Shards with the images of these classes, one for each split."""

    def write(**labels):
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        for split, numbers in labels.items():
            with tarfile.open(folder / f"{split}-0.tar", "w") as tar:
                for i, number in enumerate(numbers):
                    content = io.BytesIO()
                    Image.new("RGB", (20, 20), (40 * int(number), 0, 0)).save(content, "PNG")
                    for name, data in ((f"{i}.png", content.getvalue()), (f"{i}.cls", number.encode())):
                        info = tarfile.TarInfo(name)
                        info.size = len(data)
                        tar.addfile(info, io.BytesIO(data))
        return f"wds/{folder}"

    return write


def listed(folder, **labels):
    """Flat splits, and the classes of their images in lists."""
    for split, names in labels.items():
        (folder / split).mkdir(parents=True)
        for i, name in enumerate(names):
            Image.new("RGB", (20, 20), (40 * int(name), 0, 0)).save(folder / split / f"{i}.png")
        (folder / f"{split}.txt").write_text("".join(f"{i}.png class{n}\n" for i, n in enumerate(names)))
    return str(folder)


def paper(name, images, **changes):
    config = Deit3Config(model=name, data=str(images), out=Path("run"), steps_per_epoch=625, **changes)
    return resolve(config, CUDA)


# ---------------------------------------------------------------------- values


@pytest.mark.parametrize(
    ("name", "drop_path"), [("quickvit_h8_large_patch16_224", 0.4), ("quickvit_i8_huge_patch14_224", 0.5)]
)
def test_the_values_of_the_papers_table(images, name, drop_path):
    config = paper(name, images)
    assert config.drop_path == drop_path
    assert (config.batch_size, config.optimizer, config.learning_rate) == (2048, "lamb", 3e-3)
    assert (config.weight_decay, config.epochs, config.warmup_epochs) == (0.02, 400, 5)
    assert (config.repeats, config.clip, config.mixup, config.cutmix) == (3, 1.0, 0.8, 1.0)
    assert (config.color_jitter, config.loss, config.three_augment) == (0.3, "bce", True)
    # Beyond the table.
    assert (config.warmup_learning_rate, config.final_learning_rate) == (1e-6, 1e-5)
    assert (config.smoothing, config.crop_ratio, config.layer_scale) == (0.0, 1.0, 1e-4)
    assert (config.img_size, config.precision, config.average) == (224, "bf16", None)


@pytest.mark.parametrize(
    ("name", "rate", "decay", "drop_path"),
    [
        ("quickvit_h8_tiny_patch16_224", 4e-3, 0.05, 0.0),
        ("vit_small_patch16_224", 4e-3, 0.05, 0.05),
        ("baseline_base_patch16_224", 3e-3, 0.05, 0.2),
        ("deit3_large_patch16_224", 3e-3, 0.02, 0.4),
        ("quickvit_d8_giant_patch14_224", 3e-3, 0.02, 0.5),
    ],
)
def test_values_by_size(images, name, rate, decay, drop_path):
    config = paper(name, images)
    assert (config.learning_rate, config.weight_decay, config.drop_path) == (rate, decay, drop_path)


def test_fine_tuning_has_values_of_its_own(images, weights):
    config = paper("baseline_large_patch16_224", images, finetune=weights, img_size=384)
    assert (config.epochs, config.batch_size, config.optimizer, config.learning_rate) == (
        20,
        512,
        "adamw",
        1e-5,
    )
    assert (config.weight_decay, config.smoothing, config.loss, config.repeats) == (0.1, 0.1, "ce", 1)
    assert (config.drop_path, config.img_size, config.clip) == (0.45, 384, None)


@pytest.mark.parametrize("clip", [None, 0.5])
def test_clipping_that_is_asked_for(images, weights, clip):
    for start in (None, weights):
        config = paper("baseline_large_patch16_224", images, finetune=start, clip=clip)
        assert config.clip == clip
        assert resolve(config, CUDA).clip == clip


def test_a_small_learning_rate_does_not_rise_to_the_end(config, images):
    chosen = resolve(replace(config, learning_rate=1e-6, warmup_epochs=0, optimizer="adamw"), CPU)
    assert chosen.final_learning_rate == 1e-6
    assert paper("quickvit_h8_large_patch16_224", images, learning_rate=2e-5).final_learning_rate == 1e-5
    group, *_ = Deit3(chosen).optimizer().param_groups
    assert {group["schedules"]["lr"](step) for step in range(6)} == {1e-6}


def test_what_is_given_is_kept(images):
    config = paper("quickvit_h8_large_patch16_224", images, learning_rate=1e-3, drop_path=0.0, loss="ce")
    assert (config.learning_rate, config.drop_path, config.loss) == (1e-3, 0.0, "ce")


def test_precision_and_classes_follow_from_device_and_data(config):
    assert resolve(config, CPU).precision == "float32"
    assert resolve(config, CUDA).precision == "bf16"
    assert resolve(config, CPU).classes == 6
    assert resolve(config, CPU).steps_per_epoch == 3
    assert resolve(replace(config, classes=6), CPU).classes == 6
    assert resolve(resolve(config, CPU), CPU) == resolve(config, CPU)


def test_a_batch_larger_than_the_data(config):
    with pytest.raises(ValueError, match=r"batch_size must be at most the 18 images of .*train, got 2048"):
        resolve(replace(config, batch_size=None), CPU)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"epochs": -3}, "epochs must be at least 1, got -3"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"average": 2.0}, r"average must be at least 0 and at most 1, got 2\.0"),
        ({"learning_rate": -1.0}, r"learning_rate must be at least 0, got -1\.0"),
        ({"weight_decay": -5.0}, r"weight_decay must be at least 0, got -5\.0"),
        ({"warmup_epochs": -1.0}, r"warmup_epochs must be at least 0, got -1\.0"),
        ({"layer_decay": -1.0}, r"layer_decay must be at least 0 and at most 1, got -1\.0"),
        ({"steps_per_epoch": 0}, "steps_per_epoch must be at least 1, got 0"),
        ({"min_crop": 1.5}, r"min_crop must be above 0 and at most 1, got 1\.5"),
        ({"min_crop": 0.0}, r"min_crop must be above 0 and at most 1, got 0\.0"),
        ({"img_size": 17}, "img_size must be a positive multiple of the 4 pixels of a patch, got 17"),
        ({"clip": 0.0}, r"clip must be above 0, or null for no clipping, got 0\.0"),
        ({"clip": -1.0}, r"clip must be above 0, or null for no clipping, got -1\.0"),
        (
            {"learning_rate": 1e-6, "final_learning_rate": 1e-5},
            "final_learning_rate must be at most the learning rate of 1e-06, got 1e-05; lower it, or leave it out",
        ),
        ({"classes": 5}, r"classes must be the 6 of .*train, got 5"),
        ({"classes": 7}, r"classes must be the 6 of .*train, got 7; classes without images can be named"),
        ({"smoothing": 0.1}, r"smoothing must be 0 with the loss bce, .*got 0\.1; use --loss ce"),
        ({"finetune": Path("m"), "loss": "bce", "smoothing": 0.1}, "smoothing must be 0 with the loss bce"),
    ],
)
def test_wrong_values_are_named_before_anything_takes_time(config, changes, message):
    config = replace(config, model="vit_tiny_patch16_224", **changes)
    with pytest.raises(ValueError, match=message):
        resolve(config, CPU)


def test_fine_tuning_by_bce_smoothes_nothing(images, weights):
    options = {"finetune": weights, "loss": "bce"}
    assert paper("baseline_large_patch16_224", images, **options).smoothing == 0.0


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_the_epsilon_is_that_of_deits_commands(config, optimizer):
    groups = Deit3(resolve(replace(config, optimizer=optimizer), CPU)).optimizer().param_groups
    assert {group["eps"] for group in groups} == {1e-8}


def test_open_values_are_an_error(config):
    with pytest.raises(ValueError, match=r"open values; call resolve\(\) first"):
        Deit3(config)


# ---------------------------------------------------------------------- loss


def test_the_loss_is_timms():
    torch.manual_seed(0)
    logits, labels = torch.randn(8, 6), torch.randint(6, (8,))
    reference = BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0)
    _, mixed = Mixing(6)(torch.zeros(8, 3, 4, 4), labels, seed=0)
    assert ((mixed > 0) & (mixed < 1)).any()
    torch.testing.assert_close(bce_loss(logits, mixed), reference(logits, mixed))
    one_hot = torch.nn.functional.one_hot(labels, 6).float()
    torch.testing.assert_close(bce_loss(logits, one_hot), reference(logits, labels))


@pytest.mark.parametrize("loss", ["bce", "ce"])
def test_the_loss_of_a_batch(config, loss):
    recipe = Deit3(resolve(replace(config, loss=loss, drop_path=0.0), CPU))
    batch = next(recipe.batches(0, World()))
    assert batch.images.shape == (6, 3, 16, 16)
    assert batch.targets.shape == (6, 6)
    value, _ = recipe.loss(batch, 0)
    logits = recipe.modules["model"](batch.images)
    expected = {
        "bce": BinaryCrossEntropy(smoothing=0.0, target_threshold=0.0),
        "ce": torch.nn.CrossEntropyLoss(),
    }
    torch.testing.assert_close(value, expected[loss](logits, batch.targets))


def test_bf16_is_autocast(config):
    plain, mixed = (
        Deit3(resolve(replace(config, precision=precision, drop_path=0.0), CPU))
        for precision in ("float32", "bf16")
    )
    batch = next(plain.batches(0, World()))
    losses = []
    for recipe in (plain, mixed):
        with recipe.autocast(CPU):
            losses.append(recipe.loss(batch, 0)[0])
    assert losses[0] != losses[1]
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=0.02)
    assert losses[1].dtype == torch.float32
    assert {p.dtype for p in mixed.modules["model"].parameters()} == {torch.float32}


# ---------------------------------------------------------------------- models


@pytest.mark.parametrize("octic_depth", [0, 1, 2])
def test_octic_depth(config, octic_depth):
    model = build_model(resolve(replace(config, octic_depth=octic_depth), CPU))
    assert model.octic_depth == octic_depth


@pytest.mark.parametrize(
    "invariant",
    ["power_spectrum", "polynomial", "triple_correlation", "linear", "max_filter", "canonical"],
)
def test_invariants(config, invariant):
    recipe = Deit3(resolve(replace(config, invariant=invariant), CPU))
    assert recipe.modules["model"].config["invariant"] == invariant
    loss, _ = recipe.loss(next(recipe.batches(0, World())), 0)
    loss.backward()
    assert all(p.grad is not None for p in recipe.modules["model"].parameters())


def test_free_lift(config):
    model = build_model(resolve(replace(config, model="quickvit_h8_tiny_patch16_224", lift="free"), CPU))
    assert model.config["lift"] == "free"


@pytest.mark.parametrize(
    "name", ["quickvit_h8_tiny_patch16_224", "vit_tiny_patch16_224", "baseline_tiny_patch16_224"]
)
def test_stochastic_depth_is_the_same_everywhere(config, name):
    model = build_model(resolve(replace(config, model=name, drop_path=0.3), CPU))
    if name.startswith("quickvit"):
        assert model.config["drop_path_rate"] == 0.3
        assert model.config["uniform_drop_path"]
        assert {block.drop_path for block in model.blocks[:1]} == {0.3}
    rates = {module.drop_prob for module in model.modules() if isinstance(module, DropPath)}
    assert rates == {0.3}
    assert sum(isinstance(module, DropPath) for module in model.modules()) == (
        2 if name.startswith("quickvit") else 4
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "vit_tiny_patch16_224", "octic_depth": 1}, "octic_depth is for Quick ViTs"),
        ({"model": "baseline_tiny_patch16_224", "lift": "free"}, "lift is for Quick ViTs"),
        ({"model": "quickvit_i8_tiny_patch61_224"}, "did you mean quickvit_i8_tiny_patch16_224"),
        ({"octic_depth": 3}, "octic_depth must be between 0 and 2, got 3"),
        ({"invariant": "cubic"}, "unknown invariant 'cubic'"),
        ({"lift": "free"}, "a free lift breaks the invariance"),
        ({"model_args": {"width": 3}}, "cannot build quickvit_i8_tiny_patch16_224 with .*width"),
        ({"model_args": {"img_size": 64}}, "model_args has img_size, which --img-size decides"),
        ({"model_args": {"drop_path_rate": 0.3}}, "has drop_path_rate, which --drop-path decides"),
        ({"model_args": {"num_classes": 3}}, "has num_classes, which the data decides"),
        ({"model_args": {"patch_size": 8}}, "patch_size is given twice, as 4 and as 8 in model_args"),
        ({"octic_depth": 1, "model_args": {"octic_depth": 2}}, "octic_depth is given twice, as 1 and as 2"),
        (
            {"model": "quickvit_h8_tiny_patch16_224", "invariant": "linear"},
            "invariant is for d8 and i8, quickvit_h8_tiny_patch16_224 has none, got linear",
        ),
        ({"layer_scale": -1.0}, r"init_values=-1\.0 in its configuration, expected 0 or more"),
        (
            {"model": "vit_tiny_patch16_224", "model_args": {"scriptable": False}},
            "a checkpoint could not describe vit_tiny_patch16_224 with {'scriptable': False}",
        ),
        ({"img_size": 30}, "30×30 pixels is not divisible into patches of 4"),
    ],
)
def test_wrong_models(config, changes, message):
    with pytest.raises(ValueError, match=message):
        resolve(replace(config, **changes), CPU)


def test_the_same_seed_gives_the_same_weights(config):
    state = torch.get_rng_state()
    first, second, other = (
        Deit3(resolve(replace(config, seed=seed), CPU)).modules["model"].state_dict() for seed in (1, 1, 2)
    )
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not all(torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------------- runs


def test_a_run_and_what_it_leaves(config):
    outcome = train(replace(config, average=0.5), command="quickvit train deit3")
    assert outcome.steps == 6
    assert set(outcome.evaluations[-1][1]) == {"top1", "top5", "average_top1", "average_top5"}
    assert {path.name for path in config.out.iterdir()} == {
        *(".lock", "checkpoints", "config.json", "metrics.jsonl", "model.safetensors", "starts.jsonl")
    }
    model = load_checkpoint(config.out / "model.safetensors")
    assert model.config["img_size"] == (16, 16)
    transform = preprocessing(model)
    assert (transform.size, transform.crop_ratio, transform.interpolation) == ((16, 16), 1.0, "bicubic")
    assert model.pretrained_cfg["label_names"] == tuple(map(str, range(6)))


def test_a_run_says_what_it_trains_on_and_how_it_ended(config, images, caplog):
    config = replace(config, epochs=1, steps_per_epoch=1)
    with caplog.at_level(logging.INFO, "quickvit"):
        train(config)
        train(replace(config, data=str(images / "train"), out=config.out / "inner"))
    assert [record.getMessage() for record in caplog.records] == [
        f"18 images of 6 classes in {images / 'train'}, 18 for validation",
        f"done after 1 updates in {config.out}",
        f"18 images of 6 classes in {images / 'train'}, none for validation",
        f"done after 1 updates in {config.out / 'inner'}",
    ]


def test_a_wrong_validation_split_is_found_before_the_first_update(config, images, tmp_path, monkeypatch):
    data = shutil.copytree(images, tmp_path / "data")
    (data / "val" / "5").rename(data / "val" / "other")
    monkeypatch.setattr(Deit3, "loss", lambda *_: pytest.fail("an update was computed"))
    with pytest.raises(ValueError, match="val/other is a class that"):
        train(replace(config, data=str(data)))


def test_a_validation_list_may_lack_classes(config, tmp_path, monkeypatch):
    """What is counted as right has the numbers that were trained."""
    data = listed(tmp_path / "data", train="012012", val="0202")
    recipe = Deit3(resolve(replace(config, data=data, average=0.5), CPU))
    next(recipe.batches(0, World()))
    for module in recipe.modules.values():
        monkeypatch.setattr(module, "forward", lambda x: torch.eye(3)[[2] * len(x)])
    assert recipe.evaluate(World()) == {"top1": 0.5, "average_top1": 0.5}


def test_classes_that_are_not_trained_are_found_before_the_first_update(
    config, shards, tmp_path, monkeypatch
):
    monkeypatch.setattr(Deit3, "loss", lambda *_: pytest.fail("an update was computed"))
    data = listed(tmp_path / "data", train="121212", val="0101")
    with pytest.raises(ValueError, match="'class0' is neither one of the 2 classes nor its number"):
        train(replace(config, data=data))
    with pytest.raises(ValueError, match=r"the model was not trained on the classes '3' of .*\(val\)"):
        train(replace(config, data=shards(train="012012", val="0123")))


def test_shards_are_validated_with_fewer_classes_or_not_at_all(config, shards):
    config = replace(config, epochs=1)
    assert "top1" in train(replace(config, data=shards(train="012012", val="0101"))).evaluations[-1][1]
    data = shards(train="012012")
    (Path(data.removeprefix("wds/")) / "_info.json").write_text(
        '{"splits": {"train": {"filenames": ["train-0.tar"]}}}'
    )
    assert train(replace(config, data=data, out=config.out / "inner")).evaluations == [(1, {})]


def test_data_that_changed_in_between_are_read_again(config, images, tmp_path):
    data = Path(shutil.copytree(images, tmp_path / "data"))
    config = replace(config, data=str(data))
    assert resolve(config, CPU).classes == 6
    for split in ("train", "val"):
        shutil.copytree(data / split / "0", data / split / "6")
    assert resolve(config, CPU).classes == 7


def test_evaluation_counts_every_image_once(config):
    recipe = Deit3(resolve(replace(config, batch_size=4), CPU))
    model = recipe.modules["model"].eval()
    numbers = recipe.evaluate(World())
    from quickvit.data import EvalLoader, eval_transform, open_source

    batch = next(iter(EvalLoader(open_source(config.data, "val"), eval_transform(16), batch_size=18)))
    with torch.no_grad():
        guesses = model(batch.images).topk(5).indices == batch.targets[:, None]
    assert numbers["top1"] == pytest.approx(guesses[:, 0].double().mean().item())
    assert numbers["top5"] == pytest.approx(guesses.any(1).double().mean().item())


def test_as_many_images_may_be_unreadable_in_evaluation(config, images, tmp_path):
    data = shutil.copytree(images, tmp_path / "damaged")
    for file in sorted((data / "val").rglob("*.*"))[:3]:
        file.write_bytes(b"")
    config = replace(config, data=str(data))
    with pytest.raises(ValueError, match="max_unreadable"):
        Deit3(resolve(replace(config, max_unreadable=2), CPU)).evaluate(World())
    assert "top1" in Deit3(resolve(replace(config, max_unreadable=3), CPU)).evaluate(World())


def test_data_without_validation_is_not_evaluated(config, images):
    recipe = Deit3(resolve(replace(config, data=str(images / "train")), CPU))
    assert recipe.evaluate(World()) == {}


@pytest.mark.parametrize("name", ["quickvit_i8_tiny_patch16_224", "vit_tiny_patch16_224"])
def test_fine_tuning_at_another_resolution(config, name, tmp_path):
    config = replace(config, model=name, epochs=1)
    train(config)
    start = config.out / "model.safetensors"
    other = replace(config, out=tmp_path / "finetuned", finetune=start, img_size=24, learning_rate=0.0)
    model = build_model(resolve(other, CPU)).eval()
    if name.startswith("quickvit"):
        before = load_checkpoint(start)
        before.set_input_size(24)
    else:
        from safetensors.torch import load_file

        arguments = {**SMALL, "patch_size": 4, "num_classes": 6, "init_values": 1e-4}
        before = timm.create_model(name, img_size=16, **arguments)
        before.load_state_dict(load_file(start))
        before.set_input_size(24)
    image = torch.randn(2, 3, 24, 24)
    with torch.no_grad():
        torch.testing.assert_close(model(image), before.eval()(image), rtol=1e-4, atol=1e-5)
    assert train(other).steps == 3


def test_fine_tuning_on_other_classes(config, tmp_path):
    train(replace(config, epochs=1))
    start = config.out / "model.safetensors"
    fewer = tmp_path / "images"
    for split in ("train", "val"):
        for label in range(4):
            shutil.copytree(Path(config.data) / split / str(label), fewer / split / str(label))
    other = replace(config, data=str(fewer), out=tmp_path / "other", finetune=start)
    other = resolve(other, CPU)
    model, before = build_model(other), load_checkpoint(start)
    assert model.head.weight.shape == (4, 32)
    assert torch.equal(model.blocks[0].attn.qkv.weight_1, before.blocks[0].attn.qkv.weight_1)


def test_where_weights_come_from_is_no_part_of_a_model(config):
    chosen = replace(config, model="vit_tiny_patch16_224", model_args={"depth": 2, "pretrained": False})
    train(replace(chosen, epochs=1))
    found = restore_any(*reversed(read_checkpoint(config.out / "model.safetensors")))
    assert len(found.blocks) == 2


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_fine_tuning_weights_of_wrapped_models(config, tmp_path, prefix):
    name = "baseline_tiny_patch16_224"
    model = create_model(name, img_size=16, patch_size=4, num_classes=3, **SMALL)
    state = {f"{prefix}{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save(state, tmp_path / "wrapped.pth")
    chosen = replace(config, model=name, finetune=tmp_path / "wrapped.pth")
    found = build_model(resolve(chosen, CPU))
    assert found.head.weight.shape == (6, 32)
    assert torch.equal(found.cls_token, model.cls_token)


def test_fine_tuning_another_model(config, tmp_path):
    train(replace(config, epochs=1))
    start = config.out / "model.safetensors"
    other = replace(config, finetune=start, model="quickvit_h8_tiny_patch16_224")
    with pytest.raises(CheckpointError, match=r"does not fit the model: unexpected invariant\.proj"):
        build_model(resolve(other, CPU))


def checkpoint(folder, **changes):
    """A classifier for the fixture's configuration, whose norms and biases are not those of a new model."""
    options = {"img_size": 16, "patch_size": 4, "num_classes": 6, "init_values": 0.1, "family": "i8", **SMALL}
    torch.manual_seed(0)
    model = randomize(QuickVisionTransformer(**{**options, **changes}))
    save_checkpoint(model, folder / "start.safetensors")
    return folder / "start.safetensors"


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"init_values": None},
        {"released_norm": True},
        {"global_pool": "avg", "fc_norm": False},
        {"octic_depth": 2},
    ],
    ids=str,
)
def test_fine_tuning_starts_with_the_outputs_of_the_checkpoint(config, tmp_path, changes):
    start = checkpoint(tmp_path, **changes)
    chosen = resolve(replace(config, finetune=start, octic_depth=changes.get("octic_depth")), CPU)
    image = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        assert torch.equal(build_model(chosen).eval()(image), load_checkpoint(start).eval()(image))
    assert resolve(chosen, CPU) == chosen


@pytest.mark.parametrize(
    "name", ["quickvit_i8_tiny_patch16_224", "baseline_tiny_patch16_224", "deit3_small_patch16_224"]
)
@pytest.mark.parametrize(
    "changes", [{"layer_scale": None}, {"model_args": {**SMALL, "init_values": None}}], ids=str
)
def test_models_without_layer_scale_are_trained_and_fine_tuned(config, name, changes, tmp_path):
    first = replace(config, model=name, epochs=1, **changes)
    train(first)
    start = first.out / "model.safetensors"
    state, about = read_checkpoint(start)
    assert not any("ls1" in tensor for tensor in state)
    assert restore_any(about, state).state_dict().keys() == state.keys()
    second = resolve(replace(config, model=name, finetune=start, out=tmp_path / "second"), CPU)
    assert second.layer_scale is None
    assert build_model(second).state_dict().keys() == state.keys()


def test_what_is_asked_for_wins_over_what_the_checkpoint_has(config, tmp_path):
    start = checkpoint(tmp_path, released_norm=True)
    chosen = replace(config, finetune=start, model_args={**SMALL, "released_norm": False})
    assert build_model(resolve(chosen, CPU)).config["released_norm"] is False


def test_weights_for_other_heads(config, tmp_path):
    start = checkpoint(tmp_path)
    other = replace(config, finetune=start, model_args={**SMALL, "num_heads": 4})
    with pytest.raises(
        ValueError, match=r"num_heads must be the 2 of .*start\.safetensors, got 4; set num_heads"
    ):
        resolve(other, CPU)
    options = {"img_size": 16, "patch_size": 4, **SMALL}
    baseline = create_model("baseline_tiny_patch16_224", **options)
    save_weights(baseline.state_dict(), start, standard_config(baseline))
    with pytest.raises(ValueError, match=r"num_heads must be the 2 of .*, got 4"):
        resolve(replace(other, model="baseline_tiny_patch16_224"), CPU)


# ---------------------------------------------------------------------- data


def test_images_in_memory_train_the_same_weights(config, tmp_path):
    train(config)
    train(replace(config, out=tmp_path / "cached", cache=True))
    read, kept = (
        load_checkpoint(tmp_path / run / "model.safetensors").state_dict() for run in ("run", "cached")
    )
    for name, tensor in read.items():
        assert torch.equal(tensor, kept[name]), name


def test_crops_by_the_device_train_nearly_the_same(config, tmp_path):
    losses = []
    for where in ("workers", "device"):
        run = replace(config.run, log_every=1)
        changed = replace(config, out=tmp_path / where, cache=True, colors="device", crops=where, run=run)
        train(changed)
        losses.append([row["loss"] for row in read_metrics(changed.out) if "loss" in row])
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def test_more_unreadable_images_than_allowed_stop_a_run(config, images, tmp_path):
    copy = tmp_path / "images"
    shutil.copytree(images, copy)
    broken = copy / "train" / "0" / "1.png"
    broken.write_bytes(b"no image")
    # Without repetition an epoch meets every image.
    config = replace(config, data=str(copy), repeats=1)
    with pytest.raises(TooManyUnreadable, match=re.escape(str(broken))):
        train(replace(config, max_unreadable=0))
    assert train(replace(config, out=tmp_path / "tolerant", max_unreadable=1)).steps == 6


def test_a_run_is_not_resumed_with_other_classes(config, images, tmp_path):
    """The folder may move, but what the model calls its answers stays."""
    train(config)
    moved = Path(shutil.copytree(images, tmp_path / "moved"))
    assert train(replace(config, data=str(moved))).steps == 6
    other = Path(shutil.copytree(images, tmp_path / "other"))
    for split in ("train", "val"):
        (other / split / "0").rename(other / split / "zebra")
    config = replace(config, data=str(other))
    with pytest.raises(ValueError, match="of a run with other settings: asked for class_names"):
        train(config)
    with pytest.raises(ValueError, match=r"class_names must be the .*, got 0123, which are other classes"):
        train(replace(config, class_names="0123"))


def test_two_runs_do_not_share_a_folder(config):
    config.out.mkdir()
    hold = (
        "import fcntl; f = open('.lock', 'a'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
    )
    command = [sys.executable, "-c", hold]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=config.out) as other:
        assert other.stdout.readline()
        with pytest.raises(ValueError, match="another process is training in"):
            train(config)
        other.communicate(b"\n")
    assert train(config).steps == 6
