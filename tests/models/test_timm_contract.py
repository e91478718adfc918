"""What timm expects of a model, for every registered name that is small enough to run."""

import pytest
import timm
import torch
from timm.data import resolve_data_config
from timm.models import save_for_hf
from timm.optim import param_groups_layer_decay, param_groups_weight_decay

import quickvit
from quickvit import act_on_image
from quickvit.models import FAMILIES, SIZES
from quickvit.models.zoo import PATCHES
from quickvit.testing import assert_invariant, randomize

SMALL = [f"quickvit_{family}_tiny_patch{patch}_224" for family in FAMILIES for patch in PATCHES]


def test_all_variants_are_registered():
    expected = [f"quickvit_{f}_{size}_patch{p}_224" for f in FAMILIES for size in SIZES for p in PATCHES]
    assert sorted(timm.list_models("quickvit*")) == sorted(expected)
    assert timm.is_model("quickvit_h8_large_patch16_224")


@pytest.mark.parametrize("name", SMALL)
def test_forward_and_backward(name):
    model = timm.create_model(name, num_classes=42, drop_path_rate=0.0, depth=2)
    x = torch.randn(2, 3, 224, 224)
    y = model(x)
    assert y.shape == (2, 42)
    assert y.isfinite().all()
    y.mean().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None]
    assert not missing, missing


@pytest.mark.parametrize("family", FAMILIES)
def test_channels_last(family):
    """timm's training script asks for it."""
    model = timm.create_model(f"quickvit_{family}_tiny_patch16_224", depth=2, img_size=32).eval()
    x, before = torch.randn(2, 3, 32, 32), {name: t.clone() for name, t in model.state_dict().items()}
    expected = model(x)
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(x.to(memory_format=torch.channels_last)), expected)
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert all(tensor.dtype == torch.float64 for tensor in model.double().state_dict().values())


@pytest.mark.parametrize("name", SMALL)
def test_default_configuration(name):
    model = timm.create_model(name, depth=2).eval()
    config = model.default_cfg
    assert model.pretrained_cfg is config
    assert resolve_data_config(model=model)["input_size"] == (3, 224, 224)
    assert config["architecture"] == name
    state = model.state_dict()
    assert config["classifier"] + ".weight" in state
    x = torch.randn(1, *config["input_size"])
    tokens = model.forward_features(x)
    grid = 224 // model.patch_size
    assert tokens.shape == (1, 1 + grid**2, model.num_features)
    assert model.forward_head(tokens).shape == (1, 1000)
    assert model.forward_head(tokens, pre_logits=True).shape == (1, model.head_hidden_size)
    model.reset_classifier(0)
    assert model(x).shape == (1, model.num_features)
    assert isinstance(model.get_classifier(), torch.nn.Identity)
    model.reset_classifier(0, "")
    assert model(x).shape == tokens.shape
    model.reset_classifier(5, "avg")
    assert model(x).shape == (1, 5)
    assert timm.create_model(name, depth=2, num_classes=0).head_hidden_size == model.num_features


@pytest.mark.parametrize("name", SMALL)
def test_intermediates(name):
    model = timm.create_model(name, depth=4).eval()
    x = torch.randn(2, 3, 224, 224)
    grid = 224 // model.patch_size
    with torch.no_grad():
        final, taken = model.forward_intermediates(x)
        assert [t.shape for t in taken] == [(2, 192, grid, grid)] * 4
        torch.testing.assert_close(final, model.forward_features(x))
        last = model.get_intermediate_layers(x, n=1, norm=True, return_prefix_tokens=True)[0]
        torch.testing.assert_close(torch.cat(last[::-1], 1), final)
        early = model.forward_intermediates(x, indices=[0], stop_early=True, intermediates_only=True)
        torch.testing.assert_close(early[0], taken[0])
        steerable = model.forward_steerable(x, depth=1).tokens[:, 1:]
        torch.testing.assert_close(taken[0].flatten(2).mT, steerable)
        result = model.forward_intermediates(x, indices=2, output_dict=True, return_prefix_tokens=True)
        assert set(result) == {"image_features", "image_intermediates", "image_intermediates_prefix"}
        reshaped = model.get_intermediate_layers(x, n=[1, 3], reshape=True)
        assert [t.shape for t in reshaped] == [(2, 192, grid, grid)] * 2
    if model.octic_depth > 1:
        with pytest.raises(ValueError, match="block 0 is steerable"):
            model.forward_intermediates(x, norm=True)
    with pytest.raises(ValueError, match="NHWC"):
        model.forward_intermediates(x, output_fmt="NHWC")


@pytest.mark.parametrize("name", SMALL)
def test_features_only(name):
    model = timm.create_model(name, depth=4, features_only=True, out_indices=(0, 2)).eval()
    grid = 224 // model.model.patch_size
    assert model.feature_info.channels() == [192, 192]
    assert model.feature_info.reduction() == [model.model.patch_size] * 2
    with torch.no_grad():
        features = model(torch.randn(1, 3, 224, 224))
    assert [f.shape for f in features] == [(1, 192, grid, grid)] * 2
    assert len(model.model.blocks) == 3


def test_creation_arguments():
    model = timm.create_model(
        "quickvit_i8_base_patch16_224",
        num_classes=10,
        img_size=(64, 96),
        in_chans=5,
        drop_path_rate=0.1,
        depth=2,
        invariant="canonical",
        reg_tokens=2,
    )
    assert model(torch.randn(1, 5, 64, 96)).shape == (1, 10)
    assert model(torch.randn(1, 5, 96, 64)).shape == (1, 10)
    assert [block.drop_path for block in model.blocks[:1]] == [0.0]
    with pytest.raises(TypeError, match="nonsense"):
        timm.create_model("quickvit_i8_tiny_patch16_224", nonsense=1)


@pytest.mark.parametrize("features_only", [False, True])
def test_device_and_type(features_only):
    options = {"depth": 3, "dtype": torch.float64, "features_only": features_only}
    name = "quickvit_i8_tiny_patch16_224"
    on_meta = timm.create_model(name, device="meta", **options)
    assert all(p.is_meta and p.dtype == torch.float64 for p in on_meta.parameters())
    model = timm.create_model(name, **options)
    with torch.no_grad():
        y = model(torch.randn(1, 3, 224, 224, dtype=torch.float64))
    assert (y[0] if features_only else y).dtype == torch.float64


def test_set_input_size():
    model = timm.create_model("quickvit_h8_tiny_patch16_224", depth=2).eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.set_input_size(img_size=(160, 224))
    assert model(torch.randn(1, 3, 160, 224)).shape == (1, 1000)
    assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
    with pytest.raises(ValueError, match="224×224 pixels, expected 160×224"):
        model(torch.randn(1, 3, 224, 224))
    with pytest.raises(ValueError, match="fixed at 16"):
        model.set_input_size(patch_size=14)
    with pytest.raises(ValueError, match="100×100"):
        model.set_input_size(100)


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_groups(family):
    model = timm.create_model(f"quickvit_{family}_tiny_patch16_224", depth=4)
    skipped = model.no_weight_decay()
    assert skipped >= {"pos_embed.weight", "cls_token.weight"}
    names = dict(model.named_parameters())
    groups = param_groups_weight_decay(model, 0.1, no_weight_decay_list=skipped)
    decayed = {id(p) for group in groups if group["weight_decay"] for p in group["params"]}
    assert id(names["blocks.0.mlp.fc1.weight_1"]) in decayed
    assert id(names["pos_embed.weight"]) not in decayed
    assert id(names["blocks.0.norm1.weight"]) not in decayed
    scales = {}
    for group in param_groups_layer_decay(model, layer_decay=0.5):
        scales |= {id(p): group["lr_scale"] for p in group["params"]}
    assert len(scales) == len(names)
    order = ["patch_embed.weight", "blocks.0.mlp.fc1.weight_1", "blocks.3.mlp.fc1.weight_1", "head.weight"]
    order = [name if name in names else name.replace("weight_1", "weight") for name in order]
    ranks = [scales[id(names[name])] for name in order]
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[-1] == 1
    if model.invariant is not None:
        last = f"blocks.{model.octic_depth - 1}.mlp.fc1.weight_1"
        assert scales[id(names["invariant.proj.weight"])] == scales[id(names[last])]


def test_baselines_match_in_size():
    baseline = quickvit.create_baseline("tiny", 16, depth=2)
    assert baseline(torch.randn(1, 3, 224, 224)).shape == (1, 1000)
    with pytest.raises(ValueError, match="enormous"):
        quickvit.create_baseline("enormous")


@pytest.mark.parametrize("lift", ["octic", "free"])
@pytest.mark.parametrize("channels", [1, 3, 6])
def test_weights_are_fitted_to_other_channels(channels, lift, tmp_path):
    """A grey image in all channels has the same features as in one."""
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 1, "num_heads": 2, "lift": lift}
    model = timm.create_model("quickvit_h8_tiny_patch16_224", num_classes=5, **options)
    save_for_hf(model, tmp_path, model_args={**options, "num_classes": 5})
    other = timm.create_model(f"local-dir:{tmp_path}", pretrained=True, in_chans=channels)
    grey = torch.randn(2, 1, 32, 32)
    expected = model.patch_embed(grey.expand(-1, 3, -1, -1))
    torch.testing.assert_close(other.patch_embed(grey.expand(-1, channels, -1, -1)), expected)


@pytest.mark.parametrize("family", ["h8", "i8", "d8"])
@pytest.mark.parametrize("size", [24, 48, (32, 48)])
def test_positions_are_fitted_to_other_sizes(size, family, tmp_path):
    """A grid of 3 has corners of the same shape as the 4 of these weights."""
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
    model = randomize(timm.create_model(f"quickvit_{family}_tiny_patch16_224", num_classes=5, **options))
    save_for_hf(model, tmp_path / "hub", model_args={**options, "num_classes": 5})
    other = timm.create_model(f"local-dir:{tmp_path / 'hub'}", pretrained=True, img_size=size).eval()
    quickvit.save_checkpoint(other, tmp_path / "again.safetensors")
    model.set_input_size(size)
    image = torch.randn(2, 3, *model.img_size)
    with torch.no_grad():
        expected = model.eval()(image)
        assert torch.equal(other(image), expected)
        assert torch.equal(quickvit.load_checkpoint(tmp_path / "again.safetensors").eval()(image), expected)


@pytest.mark.parametrize("options", [{"family": "i8"}, {"family": "h8", "released_init": True}])
def test_weights_start_anew(options):
    """As in a new model, in those of the meta device too, which have no values before."""
    options |= {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 4, "num_heads": 2}
    options |= {"reg_tokens": 2, "mask_token": True, "init_values": 0.1}
    new = quickvit.QuickVisionTransformer(**options)
    with torch.device("meta"):
        model = quickvit.QuickVisionTransformer(**options)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, float("nan"))
    model.init_weights()
    for (name, a), b in zip(new.named_parameters(), model.parameters(), strict=True):
        assert b.isfinite().all(), name
        if a.std() < 1e-3 * a.abs().mean() or not a.any():
            assert torch.equal(a, b), name
        else:
            assert not torch.equal(a, b), name
            if a.numel() > 1000:
                torch.testing.assert_close(b.std(), a.std(), rtol=0.15, atol=0, msg=name)


@pytest.mark.parametrize("pool", ["avg", "avgmax", "max"])
def test_pools_of_patches(pool):
    model = timm.create_model("quickvit_d8_tiny_patch16_224", global_pool=pool, depth=1, num_classes=3).eval()
    other = timm.create_model("vit_tiny_patch16_224", global_pool=pool, depth=1, num_classes=3)
    assert isinstance(model.fc_norm, torch.nn.Identity) == isinstance(other.fc_norm, torch.nn.Identity)
    x = torch.randn(2, 197, 192)
    assert torch.equal(model.pool(x), other.pool(x))
    assert_invariant(randomize(model).double(), torch.randn(4, 3, 224, 224).double(), act_on_image)
    model.reset_classifier(4, pool)
    assert model.head.out_features == 4


def test_prefix_tokens_have_timms_names():
    model = timm.create_model("quickvit_h8_tiny_patch16_224", depth=1, reg_tokens=3)
    other = timm.create_model("vit_tiny_patch16_224", depth=1, reg_tokens=3)
    for name in ("has_class_token", "num_reg_tokens", "num_prefix_tokens"):
        assert getattr(model, name) == getattr(other, name)
    bare = {"class_token": False, "global_pool": "avg"}
    assert not timm.create_model("quickvit_h8_tiny_patch16_224", depth=1, **bare).has_class_token


@pytest.mark.parametrize(
    "rate", ["drop_rate", "pos_drop_rate", "proj_drop_rate", "attn_drop_rate", "drop_path_rate"]
)
def test_rates_are_probabilities(rate):
    for value in (-0.1, 1.5):
        with pytest.raises(ValueError, match=str(value)):
            timm.create_model("quickvit_d8_tiny_patch16_224", depth=1, **{rate: value})


def test_patches_may_be_given_by_two_sides():
    model = timm.create_model("quickvit_h8_tiny_patch16_224", patch_size=(8, 8), img_size=32, depth=1)
    assert model.patch_size == model.config["patch_size"] == 8
    with pytest.raises(ValueError, match="patches must be square, got patch_size 8×16"):
        timm.create_model("quickvit_h8_tiny_patch16_224", patch_size=(8, 16), img_size=32, depth=1)
