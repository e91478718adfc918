"""Figures of what the symmetry does to weights, features and answers."""

import re
import sys
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
import torch
from small_models import small

from quickvit.group import D2, D8, DihedralGroup, act_on_image
from quickvit.layers import OcticLinear
from quickvit.report.exploration import _encode
from quickvit.report.pose_figure import draw_cayley, draw_predictions
from quickvit.report.svg import VARIABLES
from quickvit.report.weight_figure import draw_blocks, draw_filters
from quickvit.report.weights import dense_weight, principal_filters


def words(svg):
    """The texts of a figure, after the checks that every figure must pass."""
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.get("aria-label")
    assert not any(stand_in in svg for stand_in in VARIABLES)
    assert "<style" not in svg
    identifiers = re.findall(r' id="([^"]+)"', svg)
    assert len(identifiers) == len(set(identifiers))
    return [text for element in root.iter("{http://www.w3.org/2000/svg}text") if (text := element.text)]


@pytest.fixture
def layer():
    torch.manual_seed(0)
    return OcticLinear(32, 48)


@pytest.mark.parametrize("group", [D8, D2, DihedralGroup(12)], ids=str)
def test_the_dense_weight_commutes_with_the_group_in_both_bases(group):
    layer = OcticLinear(2 * group.order, 3 * group.order, group=group).double()
    torch.nn.init.normal_(layer.bias)
    x = torch.randn(5, 2 * group.order, dtype=torch.float64)
    bias = layer.out_layout.embed_invariant(layer.bias)
    torch.testing.assert_close(x @ dense_weight(layer).T, (layer(x) - bias).detach())
    regular = dense_weight(layer, regular=True)
    for g in group.elements:
        left = torch.kron(group.regular(g), torch.eye(3, dtype=torch.float64))
        right = torch.kron(group.regular(g), torch.eye(2, dtype=torch.float64))
        torch.testing.assert_close(left @ regular, regular @ right)
    assert not torch.allclose(regular[:3], torch.zeros(()).double())


def test_blocks(layer):
    found = words(draw_blocks(layer))
    assert {"A1", "A2", "B1", "B2", "E₁", "E₂", "one weight"} <= set(found)
    assert "8× fewer weights, 5.33× fewer products" in found


def test_blocks_of_the_mirror_group():
    assert "2× fewer weights, 2× fewer products" in words(draw_blocks(OcticLinear(8, 8, group=D2)))


@pytest.mark.parametrize("weighed", [False, True])
def test_principal_filters_are_of_their_irrep(octic, weighed):
    filters = principal_filters(octic, torch.rand(3, 3, 32, 32) if weighed else None)
    assert list(filters) == ["A1", "A2", "B1", "B2", "E₁", "E₂"]
    for irrep in D8.irreps:
        names = [name for name in filters if name.rstrip("₁₂") == irrep.name]
        maps = torch.stack([filters[name] for name in names])
        for g in D8.elements:
            # A steerable kernel K has g⁻¹·K = ρ(g) K.
            expected = torch.einsum("ij,j...->i...", irrep.matrix(g), maps)
            torch.testing.assert_close(act_on_image(maps, D8.inverse(g)), expected)
    vectors = filters["A1"].flatten(1)
    torch.testing.assert_close(vectors @ vectors.T, torch.eye(len(vectors), dtype=torch.float64))


def test_filters_are_weighed_by_what_there_is(octic):
    """In images of one colour there is nothing else to respond to."""
    plain = torch.tensor([1.0, 2.0, 3.0]).view(1, 3, 1, 1).expand(2, 3, 32, 32)
    first = principal_filters(octic, plain)["A1"][0]
    torch.testing.assert_close(first / first[0].mean(), plain[0, :, :8, :8].double())
    assert not torch.allclose(principal_filters(octic)["A1"][0], first, rtol=0.1)


def test_filters(octic):
    assert words(draw_filters(principal_filters(octic))) == ["A1", "A2", "B1", "B2", "E₁", "E₂"]


def test_filters_of_grey_images_and_of_few_components():
    grey = small("quickvit_h8_tiny_patch16_224", in_chans=1, patch_size=4)
    # An antisymmetric pattern of 4 × 4 pixels has one free value.
    assert len(principal_filters(grey)["A2"]) == 1
    assert words(draw_filters(principal_filters(grey)))


def test_a_free_lift_has_no_filters_by_irrep():
    with pytest.raises(ValueError, match="lift='free'"):
        principal_filters(small("quickvit_h8_tiny_patch16_224", lift="free"))


def test_cayley(exploration):
    svg = draw_cayley(exploration, 1)
    assert "var(--ink, #" in svg
    assert {"e", "r", "r²", "r³", "s", "sr", "sr²", "sr³"} <= set(words(svg))
    assert svg.count("<image") == 16


def test_predictions(exploration):
    svg = draw_predictions(exploration, 1)
    found = words(svg)
    ours, theirs = exploration.answers
    for answers in (ours, theirs):
        for pose, label in enumerate(answers.labels[1].tolist()):
            name = exploration.classes[label]
            assert (name if len(name) <= 12 else f"{name[:11]}…") in found
            assert f"{100 * answers.probabilities[1, pose, label].item():.0f} %" in found
    different = len(set(theirs.labels[1].tolist()))
    assert f"i8 1, ViT {different}." in svg


def test_the_same_numbers_give_the_same_bytes(exploration, layer, octic):
    filters = principal_filters(octic)
    for draw, subject in ((draw_blocks, layer), (draw_filters, filters), (draw_cayley, exploration)):
        assert draw(subject) == draw(subject)


def test_figures_of_larger_groups_and_of_thumbnails(exploration):
    assert "E3₂" in words(draw_blocks(OcticLinear(32, 16, group=DihedralGroup(16))))
    large = replace(exploration, pictures=(_encode(torch.zeros(3, 224, 224, dtype=torch.uint8)),) * 2)
    assert len(draw_cayley(large)) < 100_000


def test_without_matplotlib(exploration, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "quickvit\[report\]"'):
        draw_cayley(exploration)


def test_a_class_may_look_like_mathematics(exploration):
    assert "$\\frac$" in words(draw_predictions(replace(exploration, classes=("$\\frac$",) * 3)))
