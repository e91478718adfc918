"""The assertions themselves: they pass what commutes, catch what does not, and refuse what proves nothing."""

import pytest
import timm
import torch
from torch.nn import functional

from quickvit import D2, D8, Element, QuickVisionTransformer, act_on_features, act_on_image, create_baseline
from quickvit.layers import OcticBlock, OcticLinear, OcticPosition
from quickvit.testing import assert_equivariant, assert_invariant, equivariance_error, randomize

SMALL = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2, "num_classes": 5}


def features(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class BrokenLinear(OcticLinear):
    """Its bias is on A2 too, where a mirroring turns the sign."""

    def forward(self, x):
        y = super().forward(x)
        width = self.out_layout.copies
        return torch.cat([y[..., :width], y[..., width : 2 * width] + 1e-3, y[..., 2 * width :]], dim=-1)


def test_an_equivariant_layer_passes():
    layer = randomize(OcticLinear(32, 64)).double()
    assert_equivariant(layer, features(5, 32), act_on_features, act_on_features)


def test_a_broken_layer_is_caught_under_the_elements_that_it_breaks():
    layer = randomize(BrokenLinear(32, 64)).double()
    errors = equivariance_error(layer, features(5, 32), act_on_features, act_on_features)
    assert list(errors) == list(D8.elements)
    assert all((error > 1e-4) == bool(g.mirror) for g, error in errors.items())
    with pytest.raises(
        AssertionError, match=r"not equivariant under s\w*: relative error \d\.\d+e-0\d exceeds 1e-10"
    ):
        assert_equivariant(layer, features(5, 32), act_on_features, act_on_features)


def test_a_block_with_gelu_on_the_irreps_is_caught(monkeypatch):
    block = randomize(OcticBlock(64, 2, init_values=1e-4)).double().eval()
    tokens = features(3, 7, 64)
    assert_equivariant(block, tokens, act_on_features, act_on_features)
    monkeypatch.setattr(
        "quickvit.layers.mlp.octic_gelu", lambda x, bias, group, overwrite: functional.gelu(x)
    )
    with pytest.raises(AssertionError, match="not equivariant"):
        assert_equivariant(block, tokens, act_on_features, act_on_features)


def test_invariance_names_the_worst_element():
    images = features(4, 3, 8, 8)
    assert_invariant(lambda x: x.mean((2, 3)), images, act_on_image)
    with pytest.raises(AssertionError, match=r"not invariant under .*\(e 0\.0e\+00, r \d"):
        assert_invariant(lambda x: x[..., :4].mean((2, 3)), images, act_on_image)


def test_the_group_decides_which_elements_are_tried():
    images = features(4, 3, 8, 8)

    def columns(x):
        return (x + x.flip(-1)).mean(2)

    assert_invariant(columns, images, lambda x, g: act_on_image(x, g, D2), D2)
    with pytest.raises(AssertionError, match=r"under s?r"):
        assert_invariant(columns, images, act_on_image)


@pytest.mark.parametrize(
    ("inputs", "outputs", "tolerance"),
    [(torch.uint8, torch.float32, "1e-05"), (torch.float64, torch.bfloat16, "2e-01")],
    ids=str,
)
def test_the_tolerance_is_that_of_the_outputs(inputs, outputs, tolerance):
    images = (100 * features(4, 3, 8, 8).abs()).to(inputs)
    assert_invariant(lambda x: x.double().mean((2, 3)).to(outputs), images, act_on_image)
    with pytest.raises(AssertionError, match=f"exceeds {tolerance}"):
        assert_invariant(lambda x: x[..., 0].double().mean(2).to(outputs), images, act_on_image)


def test_outputs_are_no_whole_numbers():
    with pytest.raises(
        ValueError, match=r"gives torch\.int64, expected one of torch\.float64, torch\.float32"
    ):
        assert_invariant(lambda x: x.long(), features(4, 3, 8, 8), act_on_image)


def test_a_constant_function_is_refused():
    def constant(x):
        return torch.ones(len(x), 3, dtype=x.dtype)

    with pytest.raises(ValueError, match="same output for all 4 inputs"):
        assert_invariant(constant, features(4, 3, 8, 8), act_on_image)


def test_a_nearly_constant_function_is_judged_by_what_it_does_with_its_input():
    def nearly(x):
        return 1e3 + 1e-3 * x[..., :4].mean((2, 3))

    errors = equivariance_error(nearly, features(4, 3, 8, 8), act_on_image, lambda y, g: y)
    assert max(errors.values()) > 0.1


@pytest.mark.parametrize("offset", [1.0, 1e2, 1e4])
def test_rounding_follows_the_size_of_outputs(offset):
    """As of a classifier that was trained for a short time: it says almost the same of every image."""
    images = 30 * features(4, 3, 64, 64).float()
    assert_invariant(lambda x: (offset + x).mean((2, 3)), images, act_on_image)
    with pytest.raises(AssertionError, match="not invariant"):
        assert_invariant(lambda x: (offset + x)[..., :4].mean((2, 3)), images, act_on_image)


@pytest.mark.parametrize(
    ("function", "inputs", "message"),
    [
        (lambda x: x / 0, features(4, 3, 8, 8), "not finite, for g = e"),
        (lambda x: x.mean(1), features(1, 3, 8, 8), r"at least two inputs, got shape \(1, 3, 8, 8\)"),
        (lambda x: x.mean(1), features(4, 3, 1, 1), "element r leaves the inputs"),
        (lambda x: x.mean(1), features(4, 3, 8, 6), r"shape \(4, 6, 8\) for g = r, g·f\(x\) \(4, 8, 6\)"),
    ],
)
def test_what_proves_nothing_is_refused(function, inputs, message):
    with pytest.raises(ValueError, match=message):
        assert_invariant(function, inputs, act_on_image)


def test_randomize_is_a_function_of_the_seed():
    models = [randomize(QuickVisionTransformer(family="i8", init_values=1e-4, **SMALL), s) for s in (1, 1, 2)]
    first, same, other = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    "model",
    [
        QuickVisionTransformer(family="d8", init_values=1e-4, reg_tokens=2, **SMALL),
        create_baseline("tiny", img_size=32, depth=2, reg_tokens=2),
        timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2),
    ],
    ids=["quickvit", "baseline", "timm"],
)
def test_randomize_gives_every_parameter_an_ordinary_size(model):
    for name, parameter in randomize(model).named_parameters():
        assert parameter.numel() < 4 or parameter.std() > 0.01, name
        if name.endswith("gamma") or ("norm" in name and name.endswith("weight")):
            assert parameter.min() >= 0.5, name
            assert parameter.max() <= 1.5, name
    images = features(4, 3, 32, 32).float()
    logits = model.eval()(images)
    assert logits.std(0).mean() > 0.05


def test_a_model_whose_positions_are_not_symmetric_is_caught(monkeypatch):
    model = randomize(QuickVisionTransformer(family="i8", init_values=1e-4, **SMALL)).double().eval()
    images = features(3, 3, 32, 32)
    with torch.no_grad():
        assert_invariant(model, images, act_on_image)
        positions = features(4, 4, 64)
        monkeypatch.setattr(OcticPosition, "forward", lambda self, height, width: positions)
        with pytest.raises(AssertionError, match="not invariant"):
            assert_invariant(model, images, act_on_image)


def test_elements_have_the_names_that_errors_use():
    assert [str(g) for g in D8.elements] == ["e", "r", "r2", "r3", "s", "sr", "sr2", "sr3"]
    assert str(Element(1, 0)) == "s"
