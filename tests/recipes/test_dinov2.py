"""DINOv2's recipe: its values, its loss, one process and many, interruptions, odd batches, collapse, checkpoints."""

import json
import logging
import math
import re
import shutil
from dataclasses import dataclass, field, replace
from itertools import islice

import numpy as np
import pytest
import tiny_runs
import torch
from PIL import Image
from safetensors import SafetensorError

from quickvit import QuickVisionTransformer, load_checkpoint, save_checkpoint
from quickvit.cli import main
from quickvit.data import TooManyUnreadable, open_source
from quickvit.evaluate.classification import open_splits
from quickvit.models import checkpoints
from quickvit.models.checkpoints import read_checkpoint
from quickvit.models.standard import restore_any
from quickvit.recipes import Dinov2, Dinov2Config
from quickvit.recipes.dino.backbone import HiddenPatches
from quickvit.recipes.dino.progress import collect
from quickvit.recipes.dinov2 import resolve, train
from quickvit.train import NonFinite, RunConfig, Trainer, World, read_metrics

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Unlabelled images, some nested and some not."""
    folder = tmp_path_factory.mktemp("images")
    generator = np.random.default_rng(0)
    (folder / "more").mkdir()
    for i in range(20):
        pixels = generator.integers(0, 256, (5, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((20, 24)).save(folder / ("more" if i % 2 else "") / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """A few images of two classes, one of them brighter."""
    folder = tmp_path_factory.mktemp("labelled")
    generator = np.random.default_rng(1)
    for split, number in (("train", 11), ("val", 5)):
        for label in range(2):
            place = folder / split / f"class{label}"
            place.mkdir(parents=True)
            for i in range(number):
                pixels = generator.integers(60 * label, 60 * label + 180, (16, 16, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{i}.png")
    return str(folder)


@pytest.fixture
def config(images, tmp_path):
    def build(run=None, **changes):
        return tiny_runs.views_config(images, tmp_path / "run", run, **changes)

    return build


def recipe_of(config):
    return Dinov2(resolve(config, CPU))


def first_batch(recipe):
    return next(recipe.batches(0, World()))


# ---------------------------------------------------------------------- values


def large(**changes):
    return Dinov2Config("quickvit_h8_large_patch16_224", "digits", "run", **changes)


def test_the_values_are_those_of_the_paper():
    config = resolve(large(), CUDA)
    assert (config.steps, config.batch_size, config.learning_rate, config.prototypes) == (
        125_000,
        1024,
        4e-3,
        65536,
    )
    assert (config.warmup_steps, config.temperature_steps, config.frozen_steps) == (12_500, 37_500, 1_250)
    assert (config.img_size, config.local_size, config.local_views) == (224, 96, 8)
    assert (config.drop_path, config.layer_scale, config.clip, config.koleo_weight) == (0.3, 1e-5, 3.0, 0.1)
    assert (config.mask_probability, config.mask_ratio, config.group) == (0.5, (0.1, 0.5), 64)
    assert (config.precision, config.centering, config.run.evaluate_every) == ("bf16", "softmax", 12_500)
    assert (config.momentum, config.first_teacher_temperature, config.teacher_temperature) == (
        0.992,
        0.04,
        0.07,
    )


@pytest.mark.parametrize(
    ("size", "batch_size", "group"),
    [("large", 1024, 64), ("huge", 1024, 32), ("large", 96, 32), ("huge", 48, 16), ("large", 320, 64)],
)
def test_a_group_is_what_a_gpu_has_or_divides_the_batch(size, batch_size, group):
    config = Dinov2Config(f"quickvit_h8_{size}_patch16_224", "digits", "run", batch_size=batch_size)
    assert resolve(config, CPU).group == group


def test_local_views_have_whole_patches():
    config = Dinov2Config("quickvit_i8_huge_patch14_224", "digits", "run")
    assert resolve(config, CPU).local_size == 98
    assert resolve(replace(config, img_size=98), CPU).local_size == 42
    assert resolve(replace(config, local_size=112), CPU).local_size == 112


@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_the_small_preset_is_for_small_models(size):
    config = resolve(
        Dinov2Config(f"quickvit_h8_{size}_patch16_224", "digits", "run", preset="small", batch_size=128), CPU
    )
    assert config.prototypes < 65536
    assert config.steps == 10_000
    assert config.warmup_steps == 1_000
    assert config.batch_size == 128


def test_schedules_and_groups(config):
    recipe = recipe_of(config(batch_size=16, steps=100, learning_rate=4e-3, precision="float64"))
    optimizer = Trainer(recipe, RunConfig()).optimizer
    found = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    names = {
        f"{module}.{name}": found.pop(id(p))["schedules"]
        for module in ("student", "student_head")
        for name, p in recipe.modules[module].named_parameters()
    }
    assert not found
    peak = 4e-3 * math.sqrt(16 / 1024)
    rate = {name: schedules["lr"] for name, schedules in names.items()}
    decay = {name: schedules["weight_decay"] for name, schedules in names.items()}
    # Two blocks below the last norm, the stem below them.
    assert rate["student.vit.norm.weight"](9) == pytest.approx(peak)
    assert rate["student.vit.blocks.1.attn.qkv.weight"](9) == pytest.approx(0.9 * peak)
    assert rate["student.vit.cls_token.weight"](9) == pytest.approx(0.9**3 * peak)
    assert rate["student.vit.mask_token.weight"](9) == pytest.approx(0.9**3 * peak)
    assert rate["student.vit.patch_embed.weight"](9) == pytest.approx(0.2 * 0.9**3 * peak)
    assert rate["student_head.mlp.0.weight"](0) == 0
    assert rate["student_head.mlp.0.weight"](9) == pytest.approx(peak)
    assert rate["student_head.mlp.0.weight"](100) == pytest.approx(1e-6)
    assert rate["student_head.prototypes"](0) == 0
    assert rate["student_head.prototypes"](1) == rate["student_head.mlp.0.weight"](1) > 0
    assert decay["student.vit.blocks.1.attn.qkv.weight"](0) == pytest.approx(0.04)
    assert decay["student.vit.blocks.1.attn.qkv.weight"](100) == pytest.approx(0.4)
    assert decay["student.vit.blocks.1.attn.qkv.bias"](100) == 0


def plain_schedule(base, final, steps, warmup=0, start=0.0):
    """DINOv2's: a line that reaches `base` with the last of `warmup` updates, then half a cosine."""
    rising = [start + (base - start) * i / max(1, warmup - 1) for i in range(warmup)]
    rest = steps - warmup
    return rising + [final + (base - final) * (1 + math.cos(math.pi * i / rest)) / 2 for i in range(rest)]


def test_every_value_of_every_schedule_is_that_of_the_plain_rule(config):
    recipe = recipe_of(
        config(
            batch_size=16, steps=100, warmup_steps=7, temperature_steps=30, frozen_steps=5, learning_rate=4e-3
        )
    )
    peak = 4e-3 * math.sqrt(16 / 1024)
    rates = plain_schedule(peak, 1e-6, 100, warmup=7)
    expected = {
        "rate": rates,
        "frozen": [0.0] * 5 + rates[5:],
        "decay": plain_schedule(0.04, 0.4, 100),
        "momentum": plain_schedule(0.992, 1.0, 100),
        "temperature": [0.04 + 0.03 * i / 29 for i in range(30)] + [0.07] * 70,
    }
    found = {id(p): group["schedules"] for group in recipe.optimizer().param_groups for p in group["params"]}
    head = recipe.modules["student_head"]
    schedules = {
        "rate": found[id(head.mlp[0].weight)]["lr"],
        "frozen": found[id(head.prototypes)]["lr"],
        "decay": found[id(head.mlp[0].weight)]["weight_decay"],
        "momentum": recipe._momentum,
        "temperature": recipe._temperature,
    }
    for name, values in expected.items():
        ours = [schedules[name](step) for step in range(100)]
        assert ours == pytest.approx(values, rel=1e-10, abs=1e-14), name


@pytest.mark.parametrize("model", ["quickvit_h8_tiny_patch16_224", "baseline_tiny_patch16_224"])
@pytest.mark.parametrize(("changes", "subset"), [({}, True), ({"drop_path": 0.1}, False)], ids=str)
def test_above_a_rate_of_a_tenth_samples_are_left_out_of_the_computation(config, model, changes, subset):
    resolved = resolve(config(model=model, **changes), CPU)
    assert resolved.drop_path_subset == subset
    student, teacher = (Dinov2(resolved).modules[name] for name in ("student", "teacher"))
    assert {block.drop_path_subset for block in student.vit.blocks} == {subset}
    rows = []
    handles = [
        block.norm1.register_forward_hook(lambda *args: rows.append(len(args[1][0])))
        for encoder in (student.train(), teacher.eval())
        for block in encoder.vit.blocks
    ]
    for encoder in (student, teacher):
        encoder([torch.zeros(10, 3, 16, 16), torch.zeros(20, 3, 8, 8)])
    whole, kept = 10 * 17 + 20 * 5, 8 * 17 + 16 * 5
    assert rows == [kept if subset else whole] * 2 + [whole] * 2
    assert handles


def test_a_small_learning_rate_does_not_rise_to_the_end(config):
    # Of a batch of 8, it is √(8 / 1024) of what it is of 1024.
    chosen = resolve(config(learning_rate=1e-6), CPU)
    assert chosen.final_learning_rate == pytest.approx(1e-6 * math.sqrt(8 / 1024))
    assert resolve(chosen, CPU) == chosen
    assert resolve(config(learning_rate=1e-3), CPU).final_learning_rate == 1e-6
    with pytest.raises(ValueError, match=r"final_learning_rate must be at most .* of 8\.8\d+e-08, got 1e-06"):
        resolve(config(learning_rate=1e-6, final_learning_rate=1e-6), CPU)


def test_prototypes_stay_while_they_are_frozen(config):
    recipe = recipe_of(config(frozen_steps=2, steps=20, warmup_steps=0))
    trainer, batches = Trainer(recipe, RunConfig()), recipe.batches(0, World())
    head = recipe.modules["student_head"]
    before = head.prototypes.clone(), head.mlp[0].weight.clone()
    for step in range(3):
        assert torch.equal(head.prototypes, before[0])
        trainer.update(step, next(batches), stop=False)
    assert not torch.equal(head.prototypes, before[0])
    assert not torch.equal(head.mlp[0].weight, before[1])


def dinov2_rule(name, depth, config):
    """DINOv2's factors of learning rate and weight decay for a parameter, by its name in timm's ViTs or in ours."""
    layer, backbone = depth + 1, name.startswith("student.")
    if backbone and re.search("pos_embed|patch_embed|mask_token|cls_token|reg_token", name):
        layer = 0
    elif backbone and ".blocks." in name:
        layer = int(name.split(".blocks.")[1].split(".")[0]) + 1
    rate = config.layer_decay ** (depth + 1 - layer)
    rate *= config.patch_embed_rate if "patch_embed" in name else 1
    return rate, 0.0 if name.endswith(".bias") or re.search(r"norm|\.ls\d\.", name) else 1.0


@pytest.mark.parametrize(
    ("model", "octic_depth"),
    [
        ("quickvit_h8_tiny_patch16_224", None),
        ("quickvit_i8_tiny_patch16_224", 0),
        ("quickvit_i8_tiny_patch16_224", 1),
        ("quickvit_d8_tiny_patch16_224", None),
        ("baseline_tiny_patch16_224", None),
    ],
)
def test_learning_rates_and_weight_decay_by_dinov2s_rule(config, model, octic_depth):
    recipe, found = rates_of(config, model, octic_depth)
    peak = recipe.config.learning_rate * math.sqrt(8 / 1024)
    for name, values in found.items():
        rate, decay = dinov2_rule(name, 4, recipe.config)
        assert values == pytest.approx((peak * rate, 0.04 * decay)), name


def rates_of(config, model, octic_depth):
    """A recipe, and learning rate and weight decay of all of its parameters in the first update after the warm-up."""
    depth = {"model_args": {**tiny_runs.MODEL, "depth": 4, "reg_tokens": 1}, "octic_depth": octic_depth}
    recipe = recipe_of(config(model=model, steps=100, warmup_steps=0, frozen_steps=0, **depth))
    names = {
        id(p): f"{key}.{n}"
        for key in ("student", "student_head")
        for n, p in recipe.modules[key].named_parameters()
    }
    optimizer = recipe.optimizer()
    found = {names[id(p)]: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    assert found.keys() == set(names.values())
    return recipe, found


def test_the_token_of_a_standard_vit_has_the_rate_of_its_stem(config):
    recipe = recipe_of(config(model="baseline_tiny_patch16_224"))
    optimizer = recipe.optimizer()
    rates = {id(p): group["schedules"]["lr"](5) for group in optimizer.param_groups for p in group["params"]}
    student = recipe.modules["student"]
    assert rates[id(student.mask_token)] == pytest.approx(rates[id(student.vit.cls_token)])
    assert sorted(rates) == sorted(
        id(p) for name in ("student", "student_head") for p in recipe.modules[name].parameters()
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": 1}, "KoLeo needs a group of at least 2 images, got 1"),
        ({"knn_images": 0}, "knn_images must be at least 1, got 0"),
        ({"steps": -1}, "steps must be at least 0, got -1"),
        ({"warmup_steps": -5}, "warmup_steps must be at least 0, got -5"),
        ({"momentum": 3.0}, r"^momentum must be at least 0 and at most 1, got 3\.0"),
        ({"final_momentum": -0.1}, r"^final_momentum must be at least 0 and at most 1, got -0\.1"),
        ({"local_size": 10}, "local_size must be a positive multiple of the 4 pixels of a patch, got 10"),
        ({"local_size": 0}, "local_size must be a positive multiple of the 4 pixels of a patch, got 0"),
        (
            {"local_size": 10, "model": "vit_tiny_patch16_224"},
            "local_size must be a positive multiple of the 4 pixels of a patch, got 10",
        ),
        (
            {"img_size": 18, "model": "vit_tiny_patch16_224"},
            "img_size must be a positive multiple of the 4 pixels of a patch, got 18",
        ),
        ({"prototypes": 1}, "prototypes must be at least 2, got 1"),
        ({"head_hidden": 0}, "head_hidden must be at least 1, got 0"),
        ({"teacher_temperature": 0.0}, r"^teacher_temperature must be above 0, got 0\.0"),
        ({"first_teacher_temperature": -1.0}, r"^first_teacher_temperature must be above 0, got -1\.0"),
        ({"clip": 0.0}, r"clip must be above 0, or null for no clipping, got 0\.0"),
        ({"clip": -1.0}, r"clip must be above 0, or null for no clipping, got -1\.0"),
        ({"img_size": 18}, "18×18 pixels is not divisible into patches of 4"),
        ({"model_args": {"class_token": False, "global_pool": "avg"}}, "needs a class token"),
        ({"model": "vit_tiny_patch16_224", "lift": "free"}, "lift is for Quick ViTs"),
        (
            {"group": 3},
            "group must divide the 8 images of a backward pass, got 3; set --group, for example to 1",
        ),
    ],
)
def test_wrong_values_are_named(config, changes, message):
    def attempt():
        recipe = recipe_of(config(**changes))
        recipe.loss(first_batch(recipe), 0)

    with pytest.raises(ValueError, match=message):
        attempt()


def test_sinkhorn_needs_the_whole_batch_at_once(config):
    with pytest.raises(ValueError, match="accumulate must be 1, got 2; use --centering softmax"):
        recipe_of(config({"accumulate": 2}, centering="sinkhorn"))


# ---------------------------------------------------------------------- the loss


def test_hidden_patches_come_first_and_the_rest_weighs_nothing():
    masks = torch.tensor([[False, True, True], [False] * 3, [True, False, False]])
    hidden = HiddenPatches(masks, most=5, dtype=torch.float64)
    assert hidden.rows[:3].tolist() == [1, 2, 6]
    assert hidden.counted.tolist() == [True] * 3 + [False] * 2
    assert hidden.weights.tolist() == [0.5, 0.5, 1.0, 0.0, 0.0]
    for prefix in (1, 3):
        # Each view has a class token, and perhaps registers, before its patches.
        tokens = torch.arange(3.0 * (prefix + 3)).view(3, prefix + 3, 1).requires_grad_()
        classes, patches = hidden.of(tokens)
        assert classes.tolist() == tokens[:, 0].tolist()
        assert torch.equal(patches[:3], tokens[:, prefix:][masks])
        (grad,) = torch.autograd.grad((classes.sum() + (patches[:, 0] * hidden.counted).sum()), tokens)
        assert torch.equal(grad[:, prefix:, 0].bool(), masks)
        assert (grad[:, 0] == 1).all()
        assert not grad[:, 1:prefix].any()


@pytest.mark.parametrize("model", ["quickvit_i8_tiny_patch16_224", "baseline_tiny_patch16_224"])
@pytest.mark.parametrize("local_views", [0, 2])
def test_the_loss_is_that_of_a_plain_reading(config, model, local_views):
    """View by view and patch by patch, with the modules themselves."""
    values = {"precision": "float64", "drop_path": 0.0, "local_views": local_views, "model": model}
    recipe = recipe_of(config(dino_weight=0.7, ibot_weight=1.3, koleo_weight=0.2, **values))
    targets = recipe.modules["targets"]
    generator = torch.Generator().manual_seed(0)
    for center in (targets.class_center, targets.patch_center):
        center.copy_(torch.randn(24, generator=generator, dtype=torch.float64) / 10)
    batch = first_batch(recipe)
    loss, metrics = recipe.loss(batch, 0)

    student, head = recipe.modules["student"], recipe.modules["student_head"]
    with torch.no_grad():
        dino, ibot, koleo, pairs = 0.0, 0.0, 0.0, 0
        classes = {}
        for b in range(8):
            views = batch.global_views[b].double()
            locals_ = batch.local_views[b].double()
            seen = [student([views[v : v + 1]])[0][0] for v in range(2)]
            masked = [student([views[v : v + 1]], batch.masks[b, v : v + 1])[0][0] for v in range(2)]
            target = [((head(seen[v][:1]) - targets.class_center) / 0.04).softmax(-1) for v in range(2)]
            answers = [head(masked[v][:1]) for v in range(2)]
            answers += [head(student([locals_[v : v + 1]])[0][0][:1]) for v in range(local_views)]
            for v, answer in enumerate(answers):
                for t in range(2):
                    if t != v:
                        dino -= (target[t] * (answer / 0.1).log_softmax(-1)).sum().item()
                        pairs += 1
            for v in range(2):
                classes[b, v] = masked[v][0] / masked[v][0].norm()
                hidden = batch.masks[b, v].nonzero().flatten().tolist()
                for patch in hidden:
                    wanted = ((head(seen[v][1 + patch][None]) - targets.patch_center) / 0.04).softmax(-1)
                    answer = (head(masked[v][1 + patch][None]) / 0.1).log_softmax(-1)
                    ibot -= (wanted * answer).sum().item() / len(hidden)
        for b in range(8):
            partner = b + 1 if b % 2 == 0 else b - 1  # groups of two
            koleo -= sum((classes[b, v] - classes[partner, v]).norm().log().item() for v in range(2))
    if not local_views:
        pairs += 8  # DINOv2 counts one more of each image
    expected = {"dino": dino / pairs, "ibot": ibot / 16, "koleo": koleo / 16}
    # timm resizes positions in float32.
    tolerance = 1e-10 if model.startswith("quickvit") or not local_views else 1e-6
    for name, value in expected.items():
        assert metrics[name].item() == pytest.approx(value, rel=tolerance, abs=tolerance), name
    total = 0.7 * expected["dino"] + 1.3 * expected["ibot"] + 0.2 * 2 * expected["koleo"]
    assert loss.item() == pytest.approx(total, rel=tolerance)


def test_only_the_student_learns_and_the_teacher_follows(config):
    recipe = recipe_of(
        config(precision="float64", momentum=0.6, final_momentum=0.6, warmup_steps=0, frozen_steps=0)
    )
    trainer = Trainer(recipe, RunConfig())
    before = {name: [p.clone() for p in module.parameters()] for name, module in recipe.modules.items()}
    trainer.update(0, first_batch(recipe), stop=False)
    for part in ("", "_head"):
        student, teacher = (
            list(recipe.modules[f"{who}{part}"].parameters()) for who in ("student", "teacher")
        )
        assert not all(map(torch.equal, student, before[f"student{part}"]))
        assert not any(p.requires_grad for p in teacher)
        for now, old, new in zip(teacher, before[f"teacher{part}"], student, strict=True):
            torch.testing.assert_close(now, 0.6 * old + 0.4 * new, rtol=1e-10, atol=1e-12)


def test_the_temperature_rises_and_stays(config):
    recipe = recipe_of(config(steps=100))
    values = [recipe._temperature(step) for step in (0, 29, 30, 99)]
    assert values == pytest.approx([0.04, 0.07, 0.07, 0.07])


# ---------------------------------------------------------------------- processes and interruptions


def assert_close_run(out, expected):
    """Metrics, k-NN and weights within 1e-10."""
    ours, theirs = tiny_runs.metrics(out), tiny_runs.metrics(expected)
    # Ten updates; and k-NN before, in the middle and after.
    assert len(ours) == len(theirs) == 13
    assert sum("eval/1-NN/accuracy" in row for row in theirs) == 3
    # Over the images of a rank, and averaged over the ranks.
    local = {"feature_std"}
    for row, reference in zip(ours, theirs, strict=True):
        assert row.keys() == reference.keys()
        for name in reference.keys() - local:
            assert row[name] == pytest.approx(reference[name], rel=1e-10, abs=1e-10), (name, row["step"])
    ours, theirs = (tiny_runs.tensors(folder / "model.safetensors") for folder in (out, expected))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def exact(images, labelled, tmp_path_factory):
    """Double precision, without stochastic depth, which every rank draws for itself."""

    def build(centering, run=None):
        values = {"precision": "float64", "drop_path": 0.0, "labelled": labelled, "centering": centering}
        out = tmp_path_factory.mktemp("runs") / "run"
        return tiny_runs.views_config(images, out, {"evaluate_every": 5, **(run or {})}, **values)

    return build


@pytest.fixture(scope="module")
def alone(exact):
    """The folders of runs of one process."""
    done = {}

    def run(centering):
        if centering not in done:
            chosen = exact(centering)
            assert tiny_runs.run(chosen) == 0
            done[centering] = chosen.out
        return done[centering]

    return run


@pytest.mark.parametrize(
    ("centering", "run"),
    [
        ("softmax", {"parallel": "ddp"}),
        ("sinkhorn", {"parallel": "ddp"}),
        ("softmax", {"parallel": "fsdp"}),
        ("sinkhorn", {"parallel": "fsdp"}),
    ],
    ids=["softmax-ddp", "sinkhorn-ddp", "softmax-fsdp", "sinkhorn-fsdp"],
)
def test_two_processes_compute_what_one_does(alone, exact, centering, run):
    chosen = exact(centering, run)
    tiny_runs.run_ranks(chosen, 2)
    assert_close_run(chosen.out, alone(centering))


def test_the_two_processes_had_different_numbers_of_hidden_patches(config):
    recipe = recipe_of(config())
    batches = zip(*(recipe.batches(0, World(rank, 2)) for rank in range(2)), strict=True)
    counts = [[int(batch.masks.sum()) for batch in pair] for pair in batches]
    assert len(counts) == 10
    assert any(one != two for one, two in counts)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_draw_their_own_stochastic_depth_from_the_seed(images, tmp_path, parallel):
    runs = [
        tiny_runs.views_config(
            images, tmp_path / name, {"parallel": parallel}, steps=4, drop_path=0.3, seed=seed
        )
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    ]
    for chosen in runs:
        tiny_runs.run_ranks(chosen, 2)
    first, again, other = (tiny_runs.metrics(chosen.out) for chosen in runs)
    assert first == again
    assert first != other


def test_several_passes_compute_what_one_does(alone, exact):
    chosen = exact("softmax", {"accumulate": 2})
    train(chosen)
    assert_close_run(chosen.out, alone("softmax"))


def killed_and_resumed(images, folder, workers, centering, steps, kills):
    """How many of the kills of a run, which then ended as if nothing had happened, lay within a save."""
    run = {"workers": workers, "evaluate_every": 1000}
    whole = tiny_runs.views_config(images, folder / "whole", run, steps=steps, centering=centering)
    assert tiny_runs.run(whole) == 0
    killed = replace(whole, out=folder / "killed")
    within = tiny_runs.killed_and_resumed(killed, total=steps, kills=kills, seed=workers)
    tiny_runs.assert_same_run(killed.out, whole.out)
    return within


def test_killed_and_resumed(images, tmp_path):
    killed_and_resumed(images, tmp_path, 0, "softmax", steps=30, kills=3)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "centering"), [(0, "softmax"), (2, "softmax"), (2, "sinkhorn")])
def test_killed_at_twenty_moments_and_resumed(images, tmp_path, workers, centering):
    assert killed_and_resumed(images, tmp_path, workers, centering, steps=40, kills=20) > 0


# ---------------------------------------------------------------------- odd batches


def odd_batch(kind, recipe):
    batch = first_batch(recipe)
    if kind == "duplicates":
        return batch._replace(
            global_views=batch.global_views[:1].expand_as(batch.global_views).contiguous(),
            local_views=batch.local_views[:1].expand_as(batch.local_views).contiguous(),
        )
    if kind == "constant":
        return batch._replace(
            global_views=torch.zeros_like(batch.global_views), local_views=torch.ones_like(batch.local_views)
        )
    if kind == "nothing hidden":
        return batch._replace(masks=torch.zeros_like(batch.masks))
    return batch


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("centering", ["softmax", "sinkhorn"])
@pytest.mark.parametrize("kind", ["ordinary", "duplicates", "constant", "nothing hidden"])
def test_odd_batches_are_finite(config, monkeypatch, kind, centering, precision):
    recipe = recipe_of(config(centering=centering, warmup_steps=0))
    enabled = precision != torch.float32
    monkeypatch.setattr(recipe, "autocast", lambda device: torch.autocast("cpu", precision, enabled=enabled))
    trainer = Trainer(recipe, recipe.config.run)
    batch = odd_batch(kind, recipe)
    for step in range(3):
        # Numbers that are not finite would raise NonFinite.
        metrics, _ = trainer.update(step, batch, stop=False)
        assert all(value.isfinite() for value in metrics.values())
    assert all(tensor.isfinite().all() for tensor in trainer.state().values())
    assert (metrics["ibot"] > 0) == (kind != "nothing hidden")


def test_without_masks_there_is_no_loss_of_patches(config):
    recipe = recipe_of(config(mask_probability=0.0))
    assert recipe.masking.most == 0
    trainer = Trainer(recipe, RunConfig())
    metrics, _ = trainer.update(0, first_batch(recipe), stop=False)
    assert metrics["ibot"] == 0
    assert metrics["dino"] > 0


# ---------------------------------------------------------------------- collapse


def test_without_centring_it_collapses_and_says_why(config, caplog):
    chosen = config(
        {"log_every": 10, "evaluate_every": 1000},
        centering="none",
        steps=60,
        batch_size=16,
        learning_rate=2e-2,
        momentum=0.9,
    )
    with caplog.at_level(logging.WARNING, "quickvit.recipes.dinov2"):
        train(chosen)
    (message,) = caplog.messages
    assert "COLLAPSE: all images are assigned to the same prototypes: nothing centres" in message
    last = read_metrics(chosen.out)[-1]
    assert last["prototype_entropy"] < 0.1
    assert last["agreement"] == 1


@pytest.mark.parametrize("centering", ["softmax", "sinkhorn"])
def test_with_centring_it_does_not(config, caplog, centering):
    with caplog.at_level(logging.WARNING, "quickvit.recipes.dinov2"):
        train(config({"log_every": 10, "save_every": 100}, centering=centering, steps=40, momentum=0.9))
    assert not caplog.messages


# ---------------------------------------------------------------------- updates that are not finite


@pytest.mark.parametrize("weighted", [False, True])
def test_an_update_that_is_not_finite_is_captured_and_replayed(config, images, capsys, weighted):
    chosen = config(clip=None, learning_rate=1e30, warmup_steps=0)
    if weighted:
        chosen = replace(chosen, data={str(images): 2.0})
    with pytest.raises(NonFinite, match="its batch was captured"):
        train(chosen)
    (captured,) = (chosen.out / "captured").iterdir()
    assert main(["train", "replay", str(captured), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert not found["finite"]
    assert found["output"].startswith(("teacher", "student"))


# ---------------------------------------------------------------------- checkpoints


def test_the_teacher_is_a_plain_checkpoint(config, tmp_path):
    chosen = config({"evaluate_every": 5}, snapshots=True, model="quickvit_i8_tiny_patch16_224")
    train(chosen)
    model = load_checkpoint(chosen.out / "model.safetensors")
    state = tiny_runs.last_state(chosen.out)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[f"modules.teacher.vit.{name}"])
    assert model.pretrained_cfg["crop_pct"] == 1.0
    assert model(torch.zeros(1, 3, 16, 16)).shape == (1, 32)
    kept = sorted(path.name for path in (chosen.out / "teachers").iterdir())
    assert kept == [f"step-{step:08d}.safetensors" for step in (0, 5, 10)]
    first = load_checkpoint(chosen.out / "teachers" / kept[0])
    fresh = Dinov2(resolve(chosen, CPU)).modules["teacher"].vit
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), fresh.parameters(), strict=True))
    assert "modules.targets.class_center" in state
    assert "optimizer.student_head.prototypes.exp_avg" in state


def test_a_full_disk_costs_snapshots_only(config, monkeypatch, caplog):
    save_file = checkpoints.save_file

    def full(tensors, path, **options):
        if "step-" in path:
            raise SafetensorError("Error while serializing: No space left on device")
        save_file(tensors, path, **options)

    monkeypatch.setattr(checkpoints, "save_file", full)
    chosen = config({"evaluate_every": 5}, snapshots=True)
    assert train(chosen).steps == 10
    assert caplog.text.count("no snapshot of the teacher: cannot write") == 3
    assert not list((chosen.out / "teachers").iterdir())
    assert (chosen.out / "model.safetensors").exists()


def test_an_update_that_is_left_out_counts_for_the_names_of_snapshots(config, monkeypatch):
    loss = Dinov2.loss

    def sometimes(self, batch, step):
        value, metrics = loss(self, batch, step)
        return value * (math.inf if step in (4, 9) else 1), metrics

    monkeypatch.setattr(Dinov2, "loss", sometimes)
    chosen = config({"evaluate_every": 5, "max_nonfinite": 2}, snapshots=True)
    train(chosen)
    kept = sorted(path.name for path in (chosen.out / "teachers").iterdir())
    assert kept == [f"step-{step:08d}.safetensors" for step in (0, 5, 10)]
    # And where it was the last before a restart.
    (chosen.out / "teachers" / kept[-1]).unlink()
    (chosen.out / "metrics.jsonl").unlink()
    train(chosen)
    assert sorted(path.name for path in (chosen.out / "teachers").iterdir()) == kept


@pytest.mark.parametrize("start", [0, 3])
def test_labels_of_other_classes_are_found_before_the_first_update(
    config, labelled, tmp_path, monkeypatch, start
):
    """As shards of a few images have, whose classes are numbered up to the largest."""
    splits = open_splits(labelled)
    fewer = replace(splits.test, classes=("class1",), name="fewer")
    monkeypatch.setattr("quickvit.recipes.dinov2.open_splits", lambda spec: splits._replace(test=fewer))
    with pytest.raises(
        ValueError, match=r"fewer must have the 2 classes of .*train, got 1; .* has class0\. N"
    ):
        recipe_of(config(labelled=labelled)).batches(start, World())
    # Where nobody asked for it, there is no k-NN.
    assert recipe_of(replace(config(), data=labelled)).evaluate(World()) == {}


@dataclass(frozen=True)
class InTurn(World):
    """Ranks that are there one after the other, and hear those before them."""

    said: list = field(default_factory=list)

    def gather(self, value):
        self.said.append(value)
        return list(self.said)

    def together(self, items):
        return items


def test_ranks_count_unreadable_images_together(config, labelled, tmp_path):
    data = shutil.copytree(labelled, tmp_path / "data")
    for name in ("class0", "class1"):
        (data / "train" / name / "0.png").write_bytes(b"")
    recipe, source = recipe_of(config()), open_source(data)
    options = {"batch_size": 4, "source": source, "transform": recipe.eval_transform()}
    said = []
    # One in 22 is less than the limit, two are more.
    collect(recipe._vectors, world=InTurn(0, 2, said=said), **options)
    with pytest.raises(TooManyUnreadable, match=r"2 of the 22 images of .* cannot be read"):
        collect(recipe._vectors, world=InTurn(1, 2, said=said), **options)


def test_only_training_images_are_thinned_for_neighbours(config, labelled, monkeypatch):
    recipe = recipe_of(config(labelled=labelled, knn_images=4))
    sizes = []

    def judge(train, test, world):
        sizes.append((len(train.targets), len(test.targets)))
        return {}

    monkeypatch.setattr(recipe, "judge", judge)
    recipe.evaluate(World())
    assert sizes == [(4, 10)]


def test_a_standard_vit_says_what_it_is(config):
    chosen = config(model="baseline_tiny_patch16_224")
    train(chosen)
    state, about = read_checkpoint(chosen.out / "model.safetensors")
    assert "mask_token" not in state
    model = restore_any(about, state, "the checkpoint").eval()
    teacher = tiny_runs.last_state(chosen.out)
    image = torch.randn(1, 3, 16, 16)
    assert torch.equal(model.pos_embed, teacher["modules.teacher.vit.pos_embed"])
    assert model(image).shape == (1, 32)


@pytest.mark.parametrize("model", ["quickvit_h8_tiny_patch16_224", "baseline_tiny_patch16_224"])
def test_training_goes_on_from_a_backbone_alone(config, tmp_path, model):
    first = config(model=model)
    train(first)
    file = first.out / "model.safetensors"
    second = replace(first, out=tmp_path / "second", finetune=file, img_size=24, local_size=12)
    recipe = recipe_of(second)
    for name in ("student", "teacher"):
        vit = recipe.modules[name].vit
        torch.testing.assert_close(
            vit.blocks[1].mlp.fc1.weight, tiny_runs.tensors(file)["blocks.1.mlp.fc1.weight"]
        )
        assert vit.norm.weight is not None
    assert recipe.masking.grid == (6, 6)
    train(second)
    assert (second.out / "model.safetensors").exists()
    # What is captured of a run is looked at without the checkpoint that it began from.
    again = Dinov2.rebuild(resolve(second, CPU))
    assert again.modules["student"].state_dict().keys() == recipe.modules["student"].state_dict().keys()


def test_a_backbone_with_a_head_and_without_a_mask_token_will_do(config, tmp_path):
    options = {"img_size": 16, "patch_size": 4, "num_classes": 5, "init_values": 0.1, **tiny_runs.MODEL}
    classifier = QuickVisionTransformer(**options)
    save_checkpoint(classifier, tmp_path / "classifier.safetensors")
    recipe = recipe_of(config(finetune=tmp_path / "classifier.safetensors"))
    vit = recipe.modules["student"].vit
    assert torch.equal(vit.patch_embed.weight, classifier.patch_embed.weight)
    assert not vit.mask_token.weight.any()


def test_models_without_layer_scale(config, tmp_path):
    options = {"img_size": 16, "patch_size": 4, "num_classes": 0, **tiny_runs.MODEL}
    save_checkpoint(QuickVisionTransformer(**options), tmp_path / "backbone.safetensors")
    for changes in ({"layer_scale": None}, {"finetune": tmp_path / "backbone.safetensors"}):
        recipe = recipe_of(config(**changes))
        assert recipe.config.layer_scale is None
        assert not any("ls1" in name for name in recipe.modules["student"].state_dict())


def test_settings_of_another_run_are_refused(config):
    train(config(steps=3))
    with pytest.raises(ValueError, match=r"with other settings: asked for momentum 0\.5 instead of 0\.992"):
        train(config(steps=3, momentum=0.5))


def test_several_data_keep_their_shares(config, images, labelled, tmp_path, monkeypatch):
    """Their places may change; and runs that began when shares were not noted go on."""
    chosen = replace(config(steps=3), data={str(images): 2.0, labelled: 1.0})
    train(chosen)
    moved = str(shutil.copytree(images, tmp_path / "moved"))
    assert train(replace(chosen, data={moved: 2.0, labelled: 1.0})).steps == 3
    with pytest.raises(ValueError, match=r"asked for data \[1\.0, 7\.0\] instead of \[2\.0, 1\.0\]; use an"):
        train(replace(chosen, data={str(images): 1.0, labelled: 7.0}))
    with pytest.raises(ValueError, match=r"asked for data None instead of \[2\.0, 1\.0\]"):
        train(replace(chosen, data=str(images)))
    plain = Dinov2.settings
    monkeypatch.setattr(
        Dinov2, "settings", lambda self: {k: v for k, v in plain(self).items() if k != "data"}
    )
    earlier = replace(chosen, out=tmp_path / "earlier")
    train(earlier)
    monkeypatch.undo()
    assert train(earlier).steps == 3


# ---------------------------------------------------------------------- crops by the device


def test_crops_by_the_device_are_nearly_the_same(config):
    theirs, ours = (
        first_batch(recipe_of(config(colors="device", crops=where))) for where in ("workers", "device")
    )
    assert torch.equal(theirs.masks, ours.masks)
    for name in ("global_views", "local_views"):
        assert getattr(ours, name).shape == getattr(theirs, name).shape
        assert (getattr(ours, name) - getattr(theirs, name)).abs().mean() < 0.02


def test_crops_by_the_device_train(config):
    chosen = config(crops="device", cache=True, steps=4)
    assert train(chosen).steps == 4
    assert all(math.isfinite(row["loss"]) for row in read_metrics(chosen.out) if "loss" in row)


def test_crops_by_the_device_go_on_where_they_were(config):
    recipe = recipe_of(config(crops="device"))
    later = next(recipe.batches(2, World()))
    _, _, expected = islice(recipe.batches(0, World()), 3)
    assert all(torch.equal(a, b) for a, b in zip(later, expected, strict=True))


# ---------------------------------------------------------------------- the command


def test_an_epoch_of_digits(tmp_path, capsys):
    """A tiny h8 of digits from the command line, from random weights to k-NN on its features."""
    out, batch = tmp_path / "run", 64
    steps = 1437 // batch
    command = f"""train dinov2 --model quickvit_h8_tiny_patch16_224 --data digits --out {out} --preset small
        --img-size 16 --patch-size 4 --local-size 8 --local-views 4 --batch-size {batch} --steps {steps}
        --prototypes 256 --head-hidden 128 --head-bottleneck 32 --crop-ratio 1.0
        --model-args {{"embed_dim":64,"depth":2,"num_heads":2}} --cache true
        --run.workers 0 --run.device cpu --run.log-every 11 --run.evaluate-every {steps}"""
    assert main(command.split()) == 0, capsys.readouterr().err
    rows = read_metrics(out)
    judged = {row["step"]: row for row in rows if "eval/20-NN/accuracy" in row}
    assert set(judged) == {0, steps}
    assert judged[steps]["eval/20-NN/accuracy"] > 0.2
    names = {"dino", "ibot", "koleo", "feature_std", "prototype_entropy", "prototypes_used", "agreement"}
    assert names <= set(rows[-2])
    assert all(math.isfinite(value) for row in rows for value in row.values())
    capsys.readouterr()
    assert main(["eval", "knn", str(out), "--data", "digits", "--cache", str(tmp_path), "--json"]) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert answers["20-NN"]["accuracy"] > 0.2
