"""Released checkpoints converted to Quick ViTs compute what an independent oracle says they compute."""

import argparse
from itertools import product

import pytest
import torch
from released_reference import random_released_state, released_forward
from torch import Tensor

from quickvit import load_checkpoint
from quickvit.models import convert
from quickvit.models.checkpoints import CheckpointError, restore
from quickvit.models.convert import channel_order, convert_file, convert_released

SIZE = {"width": 64, "depth": 3, "octic_depth": 2, "heads": 2, "patch": 4, "grid": 4}
MODELS = [
    pytest.param(kind, family, invariant, id=f"{kind}-{family}-{invariant}")
    for kind, (family, invariant) in product(
        ("deit3", "dinov2"), (("h8", "power_spectrum"), ("i8", "power_spectrum"), ("i8", "polynomial"))
    )
]


def released(kind="deit3", family="h8", invariant="power_spectrum", **changes) -> dict[str, Tensor]:
    classes = 5 if kind == "deit3" else 0
    return random_released_state(
        kind, family, invariant=invariant, num_classes=classes, **{**SIZE, **changes}
    )


def images(channels: int = 3) -> Tensor:
    return torch.randn(2, channels, 16, 16, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def error(model, state, kind, family, invariant, masks=None) -> float:
    """Largest difference from the oracle, in tokens, steerable tokens, and logits where there are any."""
    x = images()
    expected = released_forward(
        state, x, kind=kind, family=family, heads=SIZE["heads"], invariant=invariant, masks=masks
    )
    order = channel_order(SIZE["width"])
    model.eval()
    with torch.no_grad():
        found = model.forward_features(x, masks)
        pairs = [(found, expected["norm"][..., order] if family == "h8" else expected["norm"])]
        if masks is None:
            depth = SIZE["octic_depth"]
            pairs.append((model.forward_steerable(x).tokens, expected["tokens"][depth - 1][..., order]))
            pairs.append((model.forward_steerable(x, 0).tokens, expected["embedding"][..., order]))
        if "logits" in expected:
            pairs.append((model.forward_head(found), expected["logits"]))
    return max((a - b).abs().max().item() for a, b in pairs)


@pytest.mark.parametrize(("kind", "family", "invariant"), MODELS)
def test_outputs_are_those_of_the_released_model(kind, family, invariant):
    state = released(kind, family, invariant)
    model = convert_released(state, num_heads=2)
    assert next(model.parameters()).dtype == torch.float64
    assert model.num_classes == (5 if kind == "deit3" else 0)
    assert (model.family, model.octic_depth, model.patch_size, model.img_size) == (family, 2, 4, (16, 16))
    assert error(model, state, kind, family, invariant) < 1e-9


def test_masked_patches_are_those_of_the_released_model():
    state = released("dinov2", "i8")
    masks = torch.rand(2, 16, generator=torch.Generator().manual_seed(2)) < 0.5
    model = convert_released(state, num_heads=2)
    assert error(model, state, "dinov2", "i8", "power_spectrum", masks) < 1e-9
    assert error(model, state, "dinov2", "i8", "power_spectrum") < 1e-9
    hidden, seen = (model.forward_features(images(), mask) for mask in (masks, None))
    assert (hidden - seen).abs().max() > 0.1


@pytest.mark.parametrize(
    "changes",
    [
        {"octic_depth": 0},
        {"octic_depth": 1, "depth": 2},
        {"patch": 8, "grid": 2},
        {"heads": 4},
        {"width": 32},
    ],
    ids=str,
)
def test_other_sizes_are_inferred(changes):
    state = released("deit3", "h8", **changes)
    heads = {**SIZE, **changes}["heads"]
    model = convert_released(state, num_heads=heads).eval()
    expected = released_forward(state, images(), kind="deit3", family="h8", heads=heads)
    assert (model(images()) - expected["logits"]).abs().max() < 1e-9


@pytest.mark.parametrize(
    "broken",
    [
        "channel order forgotten",
        "positions not rescaled",
        "norm of the paper",
        "octic epsilon of the paper",
        "E copies swapped",
        "attention of other heads",
    ],
)
def test_a_broken_conversion_is_noticed(broken, monkeypatch):
    state, heads = released(), 2
    if broken == "channel order forgotten":
        monkeypatch.setattr(convert, "channel_order", torch.arange)
    elif broken == "positions not rescaled":
        monkeypatch.setattr(convert, "_positions", lambda q: torch.stack(q).permute(0, 3, 1, 2))
    elif broken == "E copies swapped":
        monkeypatch.setattr(convert, "_LIFTS", ["A1", "A2", "B1", "B2", "E_right", "E_left"])
    elif broken == "attention of other heads":
        heads = 4
    model = convert_released(state, heads)
    if broken == "norm of the paper":
        model = restore({**model.config, "released_norm": False}, model.state_dict())
    elif broken == "octic epsilon of the paper":
        for block in model.blocks[: model.octic_depth]:
            block.norm1.eps /= 10
    assert error(model, state, "deit3", "h8", "power_spectrum") > 1e-6


def test_published_sizes_need_no_number_of_heads():
    huge = convert.HEADS[1280]
    state = released(width=192, depth=1, octic_depth=1, heads=3)
    assert huge == 16
    assert convert_released(state).config["num_heads"] == 3


def test_other_sizes_need_the_number_of_heads():
    with pytest.raises(ValueError, match=r"width 64 is not known; pass num_heads"):
        convert_released(released())


def test_the_state_is_left_alone_and_not_shared():
    state = released()
    before = {name: tensor.clone() for name, tensor in state.items()}
    model = convert_released(state, 2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    assert all(torch.equal(state[name], before[name]) for name in before)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "backbone.", "module.backbone._orig_mod."])
def test_prefixes_and_training_heads_are_dropped(prefix):
    state = released("dinov2", "h8")
    wrapped = {prefix + name: tensor for name, tensor in state.items()}
    wrapped |= {"dino_head.mlp.0.weight": torch.zeros(2), "module.ibot_head.last.weight": torch.zeros(2)}
    model, expected = convert_released(wrapped, 2), convert_released(state, 2)
    assert all(map(torch.equal, model.state_dict().values(), expected.state_dict().values()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"register_tokens.0": torch.zeros(1, 4, 8)}, "left over register_tokens.0"),
        ({"blocks.0.attn.qkv.lin_E.weight": None}, "missing blocks.0.attn.qkv.lin_E.weight"),
        ({"blocks.2.gamma_1": None}, "missing blocks.2.ls1.gamma"),
        ({"blocks.1.norm1.scaling.beta": None}, "left over .*blocks.1"),
        ({"patch_embed.lift8.conv_A1.weight": None}, "no 4-d patch_embed.lift8.conv_A1.weight"),
        ({"pos_embed.0": torch.zeros(2)}, "no 3-d pos_embed.0"),
        ({"pos_embed.3": torch.zeros(3, 3, 8)}, "do not make a pos_embed.weight"),
        ({"norm.weight": torch.zeros(63)}, "do not make a norm.weight"),
        ({"head.bias": torch.zeros(6)}, r"another shape head.bias \(6,\) for \(5,\)"),
        ({"invariant_proj.weight": torch.zeros(64, 64)}, "64 invariant features, expected 48"),
        ({"cls_token.2": torch.ones(1, 1, 8)}, "cls_token must have 64 channels and be zero outside A1"),
        ({"cls_token.4": torch.ones(1, 1, 2, 16)}, "cls_token must have 64 channels and be zero outside A1"),
        ({"cls_token.4": None}, "cls_token must have 64 channels"),
        ({f"cls_token.{i}": None for i in range(6)}, "missing cls_token.0"),
        (
            {"blocks.0.mlp.fc1.lin_A1.weight": torch.zeros(32, 0)},
            r"fc1.lin_A1.weight of shape \(32, 0\) is empty",
        ),
        ({"patch_embed.lift8.conv_A1.weight": torch.zeros(0, 3, 2, 2)}, r"shape \(0, 3, 2, 2\) is empty"),
        ({"mask_token.0": torch.zeros(1, 8)}, "mask_token must have 64 channels"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_is_named(change, message):
    state = {name: tensor for name, tensor in {**released(), **change}.items() if tensor is not None}
    with pytest.raises(CheckpointError, match=message):
        convert_released(state, 2)


@pytest.mark.parametrize("kind", ["deit3", "dinov2"])
def test_a_file_is_converted(kind, tmp_path, monkeypatch):
    state = released(kind, "h8", dtype=torch.float32)
    if kind == "deit3":
        args = argparse.Namespace(lr=3e-3, drop=0.0, data_path="somewhere")
        content = {"model": state, "epoch": 400, "args": args, "optimizer": {"state": {}}}
    else:
        content = {"teacher": {f"backbone.{name}": tensor for name, tensor in state.items()}}
    torch.save(content, tmp_path / "released.pth")
    convert_file(tmp_path / "released.pth", tmp_path / "ours.safetensors", num_heads=2)
    model = load_checkpoint(tmp_path / "ours.safetensors").double()
    exact = {name: tensor.double() for name, tensor in state.items()}
    # The file holds the rescaled positions in single precision.
    assert error(model, exact, kind, "h8", "power_spectrum") < 1e-5
    with pytest.raises(CheckpointError, match="a quickvit checkpoint already"):
        convert_file(tmp_path / "ours.safetensors", tmp_path / "again.safetensors", num_heads=2)
    monkeypatch.setattr(convert, "read_checkpoint", None)
    with pytest.raises(ValueError, match=r"written to \.safetensors files, got .*out\.pth"):
        convert_file(tmp_path / "released.pth", tmp_path / "out.pth", num_heads=2)
    assert not (tmp_path / "out.pth").exists()


def test_the_command_converts(tmp_path, capsys):
    from quickvit.cli import main

    torch.save({"model": released("deit3", "i8", dtype=torch.float32)}, tmp_path / "released.pth")
    target = tmp_path / "ours.safetensors"
    assert main(["convert", str(tmp_path / "released.pth"), str(target), "--num-heads", "2"]) == 0
    assert str(target) in capsys.readouterr().out
    assert load_checkpoint(target).family == "i8"
    assert main(["convert", str(tmp_path / "nothing.pth"), str(target)]) == 2
    assert "nothing.pth" in capsys.readouterr().err
