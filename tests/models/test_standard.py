"""Checkpoints of standard ViTs say which model they are, and are not trusted."""

import pytest
import timm
import torch

from quickvit import CheckpointError, QuickVisionTransformer
from quickvit.models import create_model
from quickvit.models.checkpoints import read_checkpoint, save_weights
from quickvit.models.standard import restore_any, standard_config
from quickvit.testing import randomize

SMALL = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 3}


@pytest.fixture(params=["baseline_tiny_patch16_224", "vit_tiny_patch16_224"])
def model(request):
    return randomize(create_model(request.param, **SMALL, init_values=0.1)).eval()


def test_a_model_comes_back(model, tmp_path):
    colours = {"mean": (0.1, 0.2, 0.3), "std": (0.4, 0.5, 0.6), "crop_pct": 0.8}
    model.pretrained_cfg = {**(getattr(model, "pretrained_cfg", None) or {}), **colours}
    save_weights(model.state_dict(), tmp_path / "vit.safetensors", standard_config(model))
    state, config = read_checkpoint(tmp_path / "vit.safetensors")
    again = restore_any(config, state).eval()
    image = torch.randn(2, 3, 32, 32)
    assert torch.equal(again(image), model(image))
    assert {name: again.pretrained_cfg[name] for name in colours} == colours
    assert again.config == model.config


def test_colours_of_other_channels_come_back():
    model = create_model("baseline_tiny_patch16_224", **SMALL, in_chans=4)
    colours = {"mean": (0.1, 0.2, 0.3, 0.4), "std": (0.5, 0.6, 0.7, 0.8)}
    model.pretrained_cfg = colours
    again = restore_any(standard_config(model), model.state_dict())
    assert {name: again.pretrained_cfg[name] for name in colours} == colours


def test_quick_vits_come_back_too():
    model = QuickVisionTransformer(img_size=16, patch_size=4, embed_dim=32, depth=1, num_heads=2)
    again = restore_any(model.config, model.state_dict())
    assert isinstance(again, QuickVisionTransformer)
    with pytest.raises(CheckpointError, match="does not say of which model"):
        restore_any(None, model.state_dict())


def test_what_others_made_is_not_described():
    assert standard_config(timm.create_model("vit_tiny_patch16_224", **SMALL)) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"standard": "resnet18"}, "cannot be built: resnet18 is neither a Quick ViT nor a ViT of timm"),
        (
            {"standard": "hf-hub:someone/something"},
            "cannot be built: unknown model 'hf-hub:someone/something'",
        ),
        ({"standard": "vit_small_patch16_224"}, "does not fit the model: of another shape"),
        ({"depth": 10**6}, "has fewer tensors than the 1000000 blocks that it promises"),
        ({"depth": 3}, "does not fit the model: missing blocks.2"),
        ({"patch_size": "8"}, "has patch_size='8' in its configuration, which makes no sense"),
        ({"patch_size": 0}, "describes a model that cannot be built"),
        ({"img_size": -32}, "has img_size=-32 in its configuration"),
        ({"mlp_ratio": float("inf")}, "has mlp_ratio=inf in its configuration"),
        ({"mlp_ratio": 10**400}, "has mlp_ratio=1000"),
        ({"act_layer": "foo"}, "describes a model that cannot be built: 'foo'"),
        ({"pretrained": True}, "has pretrained=True in its configuration"),
        ({"block_fn": "Block"}, "has block_fn='Block' in its configuration"),
        ({"preprocessing": {"mean": "grey"}}, "has mean='grey' for the preparation of images"),
    ],
)
def test_nonsense_is_refused(model, change, message):
    if model.config["standard"].startswith("baseline") and "standard" in change:
        pytest.skip("once is enough")
    with pytest.raises(CheckpointError, match=message):
        restore_any({**model.config, **change}, model.state_dict())
