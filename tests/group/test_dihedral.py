"""The group axioms, the irreps and the Fourier matrix, for several dihedral groups."""

from itertools import product
from math import sqrt

import pytest
import torch

from quickvit.group import D2, D8, DihedralGroup, Element, Layout

GROUPS = [DihedralGroup(order) for order in (2, 4, 6, 8, 10, 12, 16, 24)]
# Q_reg as the paper prints it, columns A1 A2 B1 B2 E11 E12 E21 E22.
PAPER_Q_REG = (
    sqrt(2)
    / 4
    * torch.tensor(
        [
            [1, 1, 1, 1, 1, 1, 1, -1],
            [1, 1, -1, -1, 1, -1, -1, -1],
            [1, 1, 1, 1, -1, -1, -1, 1],
            [1, 1, -1, -1, -1, 1, 1, 1],
            [1, -1, 1, -1, -1, 1, -1, -1],
            [1, -1, -1, 1, -1, -1, 1, -1],
            [1, -1, 1, -1, 1, -1, 1, 1],
            [1, -1, -1, 1, 1, 1, -1, 1],
        ],
        dtype=torch.float64,
    )
)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_group_axioms(group):
    e = group.identity
    assert len(set(group.elements)) == group.order
    for g in group.elements:
        assert group.product(g, e) == group.product(e, g) == g
        assert group.product(g, group.inverse(g)) == e
    for g, h, k in product(group.elements, repeat=3):
        assert group.product(group.product(g, h), k) == group.product(g, group.product(h, k))


def test_octic_relations():
    r, s = Element(0, 1), Element(1, 0)
    assert D8.product(D8.product(s, r), s) == Element(0, 3)
    assert [str(g) for g in D8.elements] == ["e", "r", "r2", "r3", "s", "sr", "sr2", "sr3"]


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_irreps_are_orthogonal_homomorphisms(group):
    assert sum(irrep.dim**2 for irrep in group.irreps) == group.order
    for irrep in group.irreps:
        for g, h in product(group.elements, repeat=2):
            torch.testing.assert_close(
                irrep.matrix(group.product(g, h)), irrep.matrix(g) @ irrep.matrix(h), atol=1e-12, rtol=0
            )
            torch.testing.assert_close(irrep.matrix(group.inverse(g)), irrep.matrix(g).T, atol=1e-12, rtol=0)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_irreps_are_inequivalent_and_irreducible(group):
    characters = torch.stack(
        [torch.stack([irrep.matrix(g).trace() for g in group.elements]) for irrep in group.irreps]
    )
    gram = characters @ characters.T / group.order
    torch.testing.assert_close(gram, torch.eye(len(group.irreps), dtype=torch.float64), atol=1e-12, rtol=0)


@pytest.mark.parametrize("group", GROUPS, ids=str)
def test_fourier_matrix_decomposes_the_regular_representation(group):
    q = group.fourier_matrix
    torch.testing.assert_close(q @ q.T, torch.eye(group.order, dtype=torch.float64), atol=1e-12, rtol=0)
    for g in group.elements:
        torch.testing.assert_close(group.regular(g), q @ group.isotypic(g) @ q.T, atol=1e-12, rtol=0)


def test_fourier_matrix_is_the_papers():
    torch.testing.assert_close(D8.fourier_matrix, PAPER_Q_REG, atol=1e-15, rtol=0)


def test_regular_order_is_the_papers():
    assert [str(g) for g in D8.regular_order] == ["e", "r3", "r2", "r", "s", "sr3", "sr2", "sr"]


def test_flop_reduction():
    assert D2.flop_reduction == 2
    for n in (1, 2, 3, 4, 6):
        assert DihedralGroup(4 * n).flop_reduction == pytest.approx(4 * n**2 / (2 * n - 1), rel=1e-12)


def test_layout_of_the_paper():
    names = [(b.irrep.name, b.component, b.width) for b in Layout(1024).blocks]
    one = [(name, 0, 128) for name in ("A1", "A2", "B1", "B2")]
    assert names == [*one, ("E", 0, 256), ("E", 1, 256)]
    assert Layout(1024).gains == 768
    assert [b.width for b in Layout(64, D2).blocks] == [32, 32]


@pytest.mark.parametrize(("channels", "group"), [(12, D8), (0, D8), (-8, D8), (7, D2)])
def test_layout_refuses_channels_that_do_not_divide(channels, group):
    with pytest.raises(ValueError, match=str(channels)):
        Layout(channels, group)


@pytest.mark.parametrize("order", [0, 1, 3, -2])
def test_no_such_group(order):
    with pytest.raises(ValueError, match=str(order)):
        DihedralGroup(order)
