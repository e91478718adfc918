"""Every layer commutes with the group, keeps variance, and refuses what it cannot do."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from quickvit.group import D2, D8, DihedralGroup, act_on_features, act_on_grid, act_on_image, act_on_tokens
from quickvit.layers import (
    INVARIANTS,
    FreeLift,
    InvariantTokens,
    OcticAttention,
    OcticBlock,
    OcticDropout,
    OcticInvariant,
    OcticLayerNorm,
    OcticLayerScale,
    OcticLift,
    OcticLinear,
    OcticMlp,
    OcticPosition,
)
from quickvit.layers.position import resize_matrix
from quickvit.ops import octic_gelu, plain
from quickvit.ops.cpu import library
from quickvit.testing import assert_equivariant, assert_invariant, equivariance_error, randomize

D4, D16 = DihedralGroup(4), DihedralGroup(16)
GROUPS = [D2, D4, D8, DihedralGroup(6), DihedralGroup(12), D16]
PIXEL_GROUPS = [D2, D4, D8]


def tokenwise(group):
    """The layers that map steerable tokens [B, N, C] to steerable tokens."""
    width = 2 * group.order
    return {
        "linear": OcticLinear(width, 3 * width, group=group),
        "norm": OcticLayerNorm(width, group=group),
        "norm, released": OcticLayerNorm(width, released=True, group=group),
        "layer scale": OcticLayerScale(width, 1.0, group),
        "attention": OcticAttention(width, 2, group=group),
        "mlp": OcticMlp(width, 2 * width, group=group),
        "block": OcticBlock(width, 2, init_values=1.0, group=group),
        "block without layer scale": OcticBlock(width, 1, group=group),
    }


@pytest.mark.parametrize("group", GROUPS, ids=str)
@pytest.mark.parametrize("name", tokenwise(D8))
def test_tokenwise_layers_are_equivariant(group, name):
    layer = randomize(tokenwise(group)[name]).double()
    x = torch.randn(3, 5, 2 * group.order, dtype=torch.float64)
    act = partial(act_on_features, group=group)
    assert_equivariant(layer, x, act, act, group)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_gelu_is_equivariant(group):
    bias = torch.randn(3, dtype=torch.float64)
    x = torch.randn(4, 3 * group.order, dtype=torch.float64)
    act = partial(act_on_features, group=group)
    assert_equivariant(lambda x: octic_gelu(x, bias, group), x, act, act, group)


def test_a_broken_layer_is_caught():
    """A standard layer in place of each octic one, and an octic one with two blocks exchanged."""
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    for layer in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU()):
        broken = randomize(layer).double()
        errors = equivariance_error(broken, x, act_on_features, act_on_features)
        assert max(errors.values()) > 1e-2, layer
    swapped = randomize(OcticLinear(16, 16)).double()
    errors = equivariance_error(
        lambda x: swapped(x)[..., [2, 3, 0, 1, *range(4, 16)]], x, act_on_features, act_on_features
    )
    assert max(errors.values()) > 1e-2


@pytest.mark.parametrize("group", PIXEL_GROUPS, ids=str)
@pytest.mark.parametrize(("patch", "channels"), [(4, 3), (5, 1), (7, 2), (6, 4)])
def test_lift_is_equivariant(group, patch, channels):
    lift = randomize(OcticLift(patch, channels, 2 * group.order, group)).double()
    x = torch.randn(3, channels, 3 * patch, 2 * patch, dtype=torch.float64)

    def act_out(y, g):
        return act_on_features(act_on_grid(y, g, group), g, group)

    assert_equivariant(lift, x, partial(act_on_image, group=group), act_out, group)


def test_a_free_lift_is_not_equivariant():
    lift = FreeLift(4, 3, 16).double()
    x = torch.randn(3, 3, 8, 8, dtype=torch.float64)
    errors = equivariance_error(lift, x, act_on_image, lambda y, g: act_on_features(act_on_grid(y, g), g))
    assert max(errors.values()) > 0.1


@pytest.mark.parametrize("group", PIXEL_GROUPS, ids=str)
@pytest.mark.parametrize("native", [4, 5])
@pytest.mark.parametrize("grid", [(4, 4), (5, 5), (13, 13), (10, 14), (3, 2), (1, 6)])
def test_positions_commute_with_the_group_on_every_grid(group, native, grid):
    position = randomize(OcticPosition(native, 2 * group.order, group)).double()
    upright = position(*grid)
    for g in group.elements:
        turned = act_on_features(act_on_grid(upright, g, group), g, group)
        expected = position(*turned.shape[:2])
        assert (turned - expected).norm() <= 1e-10 * upright.norm()


def test_native_positions_are_not_filtered():
    position = randomize(OcticPosition(6, 16))
    torch.testing.assert_close(position(6, 6), position.unfold(position.weight).permute(1, 2, 0))


@pytest.mark.parametrize("grid", [(6, 6), (4, 4)])
def test_compiled_positions_have_the_channels_of_a_token_side_by_side(grid):
    position = randomize(OcticPosition(6, 16))
    compiled = torch.compile(position, fullgraph=True)
    with torch.no_grad():
        found = compiled(*grid)
        torch.testing.assert_close(found, position(*grid))
    assert found.is_contiguous()
    compiled(*grid).sum().backward()
    assert position.weight.grad is not None


@pytest.mark.parametrize("grid", [(6, 6), (4, 4)])
def test_autocast_does_not_round_positions(grid):
    position = randomize(OcticPosition(6, 16))
    expected = position(*grid)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(position(*grid), expected)


@pytest.mark.parametrize(("source", "target"), [(14, 6), (14, 13), (7, 16), (14, 24), (3, 2)])
def test_resizing_is_the_usual_filter(source, target):
    image = torch.randn(1, 2, source, source, dtype=torch.float64)
    matrix = torch.tensor(resize_matrix(source, target), dtype=torch.float64)
    usual = nn.functional.interpolate(image, (target, target), mode="bicubic", antialias=True)
    torch.testing.assert_close(matrix @ image @ matrix.T, usual, atol=1e-6, rtol=0)


def test_learned_tokens_are_invariant():
    tokens = randomize(InvariantTokens(3, 32))()
    assert tokens.shape == (3, 32)
    assert tokens[:, :4].abs().min() > 0
    for g in D8.elements:
        torch.testing.assert_close(act_on_features(tokens, g), tokens, atol=0, rtol=0)


@pytest.mark.parametrize("name", INVARIANTS)
def test_invariants_of_the_octic_group(name):
    invariant = randomize(OcticInvariant(32, name)).double()
    x = torch.randn(6, 4, 32, dtype=torch.float64)
    assert_invariant(invariant, x, act_on_features)


@pytest.mark.parametrize("group", [D2, D4, DihedralGroup(6)], ids=str)
@pytest.mark.parametrize("name", ["power_spectrum", "linear", "max_filter", "canonical"])
def test_invariants_of_other_groups(group, name):
    invariant = randomize(OcticInvariant(2 * group.order, name, group)).double()
    x = torch.randn(6, 4, 2 * group.order, dtype=torch.float64)
    # The matrices of max_filter and canonical are stored in single precision, exact for groups of the square.
    tolerance = 1e-10 if group.order in (2, 4, 8) else 1e-6
    assert_invariant(invariant, x, partial(act_on_features, group=group), group, tolerance)


@pytest.mark.parametrize(
    ("name", "features"),
    list(
        {
            "linear": 4,
            "power_spectrum": 24,
            "triple_correlation": 60,
            "polynomial": 128,
            "max_filter": 64,
        }.items()
    ),
)
def test_number_of_invariants(name, features):
    invariant = OcticInvariant(32, name)
    assert invariant.proj.in_features == features
    assert invariant.invariant(torch.randn(5, 32)).shape == (5, features)


@pytest.mark.parametrize("name", INVARIANTS)
def test_invariants_have_finite_gradients_at_zero(name):
    invariant = OcticInvariant(16, name)
    x = torch.zeros(2, 16, requires_grad=True)
    invariant(x).sum().backward()
    assert x.grad.isfinite().all()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in invariant.parameters())


def test_polynomials_are_the_papers():
    """The first, the last and a few others of each kind, evaluated by hand on one copy."""
    a1, a2, b1, b2, e11, e21, e12, e22 = x = torch.randn(8, dtype=torch.float64)
    psi = INVARIANTS["polynomial"](8, D8)(x)
    assert len(psi) == 32
    by_hand = {
        0: a1,
        1: e21**2 + e22**2,
        7: b2 * e21 * e22,
        13: a2 * e12 * e21 - a2 * e11 * e22,
        15: e21**4 + e22**4,
        16: e11 * e21**3 + e12 * e22**3,
        20: b1 * b2 * e12 * e21 - b1 * b2 * e11 * e22,
        25: a2 * b1 * e12 * e21 + a2 * b1 * e11 * e22,
        30: a2 * e11**2 * e12 * e21 - a2 * e11 * e12**2 * e22,
        31: a2 * e11**3 * e12 - a2 * e11 * e12**3,
    }
    for index, value in by_hand.items():
        torch.testing.assert_close(psi[index], value)


@pytest.mark.parametrize("group", [D2, D8, D16], ids=str)
def test_linear_starts_with_the_variance_of_a_standard_layer(group):
    torch.manual_seed(0)
    octic, standard = OcticLinear(768, 768, group=group), nn.Linear(768, 768)
    nn.init.trunc_normal_(standard.weight, std=0.02)
    nn.init.zeros_(standard.bias)
    x = torch.randn(512, 768)
    ratio = octic(x).var() / standard(x).var()
    assert ratio.item() == pytest.approx(1, rel=0.03)
    for block in octic.out_layout.blocks:
        assert (octic(x)[:, block.slice].var() / standard(x).var()).item() == pytest.approx(1, rel=0.15)


@pytest.mark.parametrize("patch", [14, 16, 7])
def test_lift_starts_with_the_variance_of_a_standard_layer(patch):
    torch.manual_seed(0)
    octic, standard = OcticLift(patch, 3, 768), nn.Conv2d(3, 768, patch, patch)
    octic.bias.data.zero_()
    standard.bias.data.zero_()
    x = torch.randn(64, 3, patch, patch)
    assert (octic(x).var() / standard(x).var()).item() == pytest.approx(1, rel=0.05)


def test_norm_keeps_unit_variance_and_centres_every_block():
    x = 3 * torch.randn(64, 256, dtype=torch.float64) + 5
    y = OcticLayerNorm(256).double()(x)
    torch.testing.assert_close(y.square().mean(-1), torch.ones(64, dtype=torch.float64), atol=1e-5, rtol=0)
    for block in OcticLayerNorm(256).layout.blocks:
        assert y[:, block.slice].mean(-1).abs().max() < 1e-12


def test_norm_is_the_papers_formula():
    x = torch.randn(7, 64, dtype=torch.float64)
    variances = [x[:, b.slice].var(-1, correction=0) for b in OcticLayerNorm(64).layout.blocks]
    one, two = sum(variances[:4]), sum(variances[4:])
    centred = torch.cat(
        [x[:, b.slice] - x[:, b.slice].mean(-1, keepdim=True) for b in OcticLayerNorm(64).layout.blocks], -1
    )
    paper = centred / ((one + 2 * two) / 8 + 1e-6).sqrt()[:, None]
    torch.testing.assert_close(OcticLayerNorm(64, 1e-6).double()(x), paper)
    released = centred / ((one + two / 2 + 1e-5) / 8).sqrt()[:, None]
    torch.testing.assert_close(OcticLayerNorm(64, 1e-5, released=True).double()(x), released)


@pytest.mark.parametrize("group", [D2, D8], ids=str)
def test_linear_has_the_weights_and_flops_of_the_formula(group):
    from torch.utils.flop_counter import FlopCounterMode

    layer = OcticLinear(96, 192, bias=False, group=group)
    assert sum(p.numel() for p in layer.parameters()) == 96 * 192 // group.order
    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(5, 96)).sum().backward()
    forward = 2 * 5 * 96 * 192 / group.flop_reduction
    assert counter.get_total_flops() == pytest.approx(2 * forward)  # forward, and the gradient of the weights


def test_dropout_drops_pairs_together():
    torch.manual_seed(0)
    drop = OcticDropout(64, 0.5)
    # So that it is found, and switched on in evaluation, with others.
    assert isinstance(drop, torch.nn.Dropout)
    y = drop(torch.ones(100, 64))
    dropped = y == 0
    assert 0.4 < dropped.float().mean() < 0.6
    assert torch.equal(dropped[:, 32:48], dropped[:, 48:])
    assert set(y.unique().tolist()) == {0.0, 2.0}
    x = torch.randn(4, 64)
    assert torch.equal(drop.eval()(x), x)


def test_drop_path_drops_whole_samples():
    torch.manual_seed(0)
    block = randomize(OcticBlock(16, 1, init_values=1.0, drop_path=0.5))
    x = torch.randn(64, 3, 16)
    unchanged = (block(x) == x).all(-1).all(-1).float().mean()
    assert 0.1 < unchanged < 0.4  # both branches dropped: a quarter
    assert (block.eval()(x) == x).all(-1).all(-1).sum() == 0


def test_deferred_branches_add_up_to_the_same_block():
    blocks = [randomize(OcticBlock(16, 1, init_values=1.0), seed).double().eval() for seed in range(3)]
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    expected = blocks[2](blocks[1](blocks[0](x)))
    y, pending = blocks[0](x, defer=True)
    y, pending = blocks[1](y, pending, defer=True)
    torch.testing.assert_close(blocks[2](y, pending), expected)


def test_block_with_dropout_in_training_keeps_the_bias():
    """With dropout the bias cannot wait for the next norm; a rate close to zero must change almost nothing."""
    torch.manual_seed(0)
    block = randomize(OcticBlock(64, 2, proj_drop=1e-9, init_values=1.0)).double()
    x = torch.randn(2, 5, 64, dtype=torch.float64)
    torch.testing.assert_close(block(x), block.eval()(x))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OcticLinear(12, 16), "12"),
        (lambda: OcticAttention(64, 3), "num_heads 3"),
        (lambda: OcticInvariant(16, "fourier"), "fourier"),
        (lambda: OcticInvariant(16, "polynomial", D2), "D8 only"),
        (lambda: OcticLift(4, 3, 16, D16), "D16"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_act_on_tokens_is_what_attention_commutes_with():
    """Moving tokens and channels at once, with a class token in front."""
    layer = randomize(OcticBlock(16, 2, init_values=1.0)).double()
    x = torch.randn(3, 1 + 6, 16, dtype=torch.float64)

    def act(x, g):
        return act_on_tokens(x, g, (2, 3), prefix=1)

    assert_equivariant(layer, x, act, act)


@pytest.mark.skipif(not library.available(), reason="needs the kernels in C")
@pytest.mark.parametrize("layer", [OcticAttention(32, 2), OcticMlp(32, 64)], ids=["attention", "mlp"])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_by_kernels_are_those_of_the_definitions(layer, compiled, monkeypatch):
    """Of all parameters: a bias that one step adds and another sums the gradient of must not count twice."""
    # On a GPU the perceptron is several operators in training.
    monkeypatch.setattr("quickvit.layers.mlp.takes_mlp", lambda *_: False)
    x = torch.randn(2, 5, 32)
    exact = randomize(copy.deepcopy(layer)).double()
    layer = copy.deepcopy(exact).float()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    found = torch.autograd.grad(run(x).square().sum(), list(layer.parameters()))
    with plain():
        expected = torch.autograd.grad(exact(x.double()).square().sum(), list(exact.parameters()))
    for (name, _), a, b in zip(layer.named_parameters(), found, expected, strict=True):
        assert (a - b).abs().max() < 1e-4 * b.abs().max(), name
