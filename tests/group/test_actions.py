"""The actions on images, grids and features, the Fourier transform between bases, and unfolding."""

import math
from itertools import product

import pytest
import torch

from quickvit.group import (
    D2,
    D8,
    DihedralGroup,
    Element,
    Unfolding,
    act_on_features,
    act_on_grid,
    act_on_image,
    act_on_tokens,
    isotypic_to_regular,
    regular_to_isotypic,
)
from quickvit.group.layout import packed_fourier_matrix

PIXEL_GROUPS = [D2, DihedralGroup(4), D8]
ALL_GROUPS = [*PIXEL_GROUPS, DihedralGroup(6), DihedralGroup(16)]


def test_generators_on_an_image():
    image = torch.tensor([[1, 2], [3, 4]])
    assert act_on_image(image, Element(0, 1)).tolist() == [[2, 4], [1, 3]]  # anti-clockwise
    assert act_on_image(image, Element(1, 0)).tolist() == [[2, 1], [4, 3]]  # left to right


@pytest.mark.parametrize("group", PIXEL_GROUPS, ids=str)
def test_actions_are_homomorphisms(group):
    image = torch.randn(3, 5, 4)
    tokens = torch.randn(2, 1 + 20, 16, dtype=torch.float64)
    for g, h in product(group.elements, repeat=2):
        gh = group.product(g, h)
        assert torch.equal(
            act_on_image(act_on_image(image, h, group), g, group), act_on_image(image, gh, group)
        )
        turned = (4, 5) if group == D8 and h.turns % 2 else (5, 4)
        twice = act_on_tokens(act_on_tokens(tokens, h, (5, 4), group, prefix=1), g, turned, group, prefix=1)
        torch.testing.assert_close(twice, act_on_tokens(tokens, gh, (5, 4), group, prefix=1))


def test_grid_action_moves_tokens_like_pixels():
    image = torch.randn(6, 4, 3)
    for g in D8.elements:
        assert torch.equal(act_on_grid(image, g), act_on_image(image.permute(2, 0, 1), g).permute(1, 2, 0))


def test_groups_off_the_pixel_grid_are_refused():
    with pytest.raises(ValueError, match="D16"):
        act_on_image(torch.zeros(4, 4), Element(0, 1), DihedralGroup(16))


@pytest.mark.parametrize("group", ALL_GROUPS, ids=str)
def test_fourier_transform_intertwines(group):
    x = torch.randn(5, 3 * group.order, dtype=torch.float64)
    regular = isotypic_to_regular(x, group)
    torch.testing.assert_close(regular_to_isotypic(regular, group), x)
    by_matrix = packed_fourier_matrix(group) @ x.unflatten(-1, (group.order, -1))
    torch.testing.assert_close(regular, by_matrix.flatten(-2))
    for g in group.elements:
        permuted = (group.regular(g) @ regular.unflatten(-1, (group.order, -1))).flatten(-2)
        torch.testing.assert_close(isotypic_to_regular(act_on_features(x, g, group), group), permuted)


@pytest.mark.parametrize("group", PIXEL_GROUPS, ids=str)
@pytest.mark.parametrize("side", [4, 5])
def test_unfolded_maps_are_steerable(group, side):
    unfold = Unfolding((side, side), group)
    corner = torch.randn(unfold.num_corners, 3, *unfold.corner_size, dtype=torch.float64)
    full = unfold(corner)
    for g in group.elements:
        # K ∘ g = ρ(g) K, with channels first
        moved = act_on_image(full, group.inverse(g), group)
        turned = act_on_features(full.movedim(0, -1), g, group).movedim(-1, 0)
        torch.testing.assert_close(moved, turned)


@pytest.mark.parametrize("group", PIXEL_GROUPS, ids=str)
@pytest.mark.parametrize("side", [1, 2, 3, 4, 5])
def test_unfolding_reaches_all_steerable_maps(group, side):
    """The projection to them is the mean of the group's action, and its trace their number."""
    unfold = Unfolding((side, side), group)
    corners = torch.eye(unfold.num_corners * math.prod(unfold.corner_size), dtype=torch.float64)
    maps = torch.stack([unfold(c.view(unfold.num_corners, 1, *unfold.corner_size)) for c in corners])
    every = torch.eye(maps[0].numel(), dtype=torch.float64).view(-1, group.order, side, side)
    mean = sum(
        act_on_features(act_on_image(every, g, group).movedim(1, -1), g, group).movedim(-1, 1)
        for g in group.elements
    )
    number = round((mean.flatten(1).trace() / group.order).item())
    assert torch.linalg.matrix_rank(maps.flatten(1)) == number


def test_actions_are_exact_under_autocast():
    group = DihedralGroup(12)
    x = torch.randn(2, 5, 48)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(act_on_features(x, D8.identity), x)
        assert torch.equal(act_on_features(x, group.identity, group), x)
        back = regular_to_isotypic(isotypic_to_regular(x, group), group)
    torch.testing.assert_close(back, x)


@pytest.mark.parametrize("side", [4, 6, 5, 7])
def test_unfolding_gain_measures_the_mean_square(side):
    unfold = Unfolding((side, side))
    corner = torch.randn(6, 4000, *unfold.corner_size)
    ratio = (corner.square().mean() / unfold(corner).square().mean()).sqrt().item()
    assert unfold.gain == pytest.approx(ratio, rel=0.03)


def test_unfolding_matches_the_closed_form():
    """The quarters that follow from the characters: A1 and B2 symmetric, A2 and B1 antisymmetric, E free."""
    w = torch.randn(6, 1, 2, 2, dtype=torch.float64)
    a1, a2, b1, b2, e11, e21, e12, e22 = Unfolding((4, 4))(w)[:, :2, :2]
    root = 8**-0.5
    torch.testing.assert_close(a1, root * (w[0, 0] + w[0, 0].T))
    torch.testing.assert_close(a2, root * (w[1, 0] - w[1, 0].T))
    torch.testing.assert_close(b1, root * (w[2, 0] - w[2, 0].T))
    torch.testing.assert_close(b2, root * (w[3, 0] + w[3, 0].T))
    torch.testing.assert_close(e11, w[4, 0] / 2)
    torch.testing.assert_close(e21, w[5, 0] / 2)
    torch.testing.assert_close(e12, -w[4, 0].T / 2)
    torch.testing.assert_close(e22, -w[5, 0].T / 2)


def test_quarter_turns_need_a_square_grid():
    with pytest.raises(ValueError, match="4×6"):
        Unfolding((4, 6))
    Unfolding((4, 6), D2)
