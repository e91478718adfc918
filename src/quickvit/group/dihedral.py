"""Dihedral groups, built from their generators: elements, irreps, regular representation, Fourier matrix."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import cos, pi, sin, sqrt

import torch
from torch import Tensor


@dataclass(frozen=True, order=True)
class Element:
    """The group element s^mirror r^turns: first `turns` rotations, then perhaps the mirroring."""

    mirror: int
    turns: int

    def __str__(self) -> str:
        turns = {0: "", 1: "r"}.get(self.turns, f"r{self.turns}")
        return ("s" if self.mirror else "") + turns or "e"


@dataclass(frozen=True)
class Irrep:
    """An irreducible representation, given by the matrices ρ(r) and ρ(s) of the two generators."""

    name: str
    r: tuple[tuple[float, ...], ...]
    s: tuple[tuple[float, ...], ...]

    @property
    def dim(self) -> int:
        """Dimension d of the representation space."""
        return len(self.r)

    def matrix(self, g: Element) -> Tensor:
        """ρ(g) = ρ(s)^mirror ρ(r)^turns, a d × d matrix in float64."""
        r = torch.tensor(self.r, dtype=torch.float64, device="cpu")
        s = torch.tensor(self.s, dtype=torch.float64, device="cpu")
        return torch.linalg.matrix_power(s, g.mirror) @ torch.linalg.matrix_power(r, g.turns)


@dataclass(frozen=True)
class DihedralGroup:
    """The symmetries of a regular polygon: ⟨r, s | r^n = s² = e, srs = r⁻¹⟩ with n = order / 2 rotations.

    Order 8 is the octic group D8 of the paper, order 2 the mirror group of the H2 baseline, and order 4n the
    larger groups of its appendix.
    """

    order: int
    # Plain attributes rather than cached properties: torch.compile reads them as constants.
    elements: tuple[Element, ...] = field(init=False, repr=False, compare=False)
    irreps: tuple[Irrep, ...] = field(init=False, repr=False, compare=False)
    num_one_dim: int = field(init=False, repr=False, compare=False)
    num_two_dim: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.order < 2 or self.order % 2:
            raise ValueError(f"a dihedral group has an even order of at least 2, got {self.order}")
        irreps = _irreps(self.order // 2)
        one_dim = sum(irrep.dim == 1 for irrep in irreps)
        # As the paper lists them: e, r, r², …, s, sr, sr², …
        elements = tuple(Element(mirror, turns) for mirror in (0, 1) for turns in range(self.order // 2))
        object.__setattr__(self, "elements", elements)
        object.__setattr__(self, "irreps", irreps)
        object.__setattr__(self, "num_one_dim", one_dim)
        object.__setattr__(self, "num_two_dim", len(irreps) - one_dim)

    def __str__(self) -> str:
        return f"D{self.order}"

    @property
    def rotations(self) -> int:
        """Number n of rotations."""
        return self.order // 2

    @property
    def identity(self) -> Element:
        """The neutral element e."""
        return Element(0, 0)

    def product(self, g: Element, h: Element) -> Element:
        """The element gh, which acts as h first and g second; r s = s r⁻¹ moves s to the front."""
        turns = -g.turns if h.mirror else g.turns
        return Element(g.mirror ^ h.mirror, (turns + h.turns) % self.rotations)

    def inverse(self, g: Element) -> Element:
        """The element g⁻¹; mirrorings are their own inverses."""
        return g if g.mirror else Element(0, -g.turns % self.rotations)

    @property
    def regular_order(self) -> tuple[Element, ...]:
        """The order in which the paper lists φ: G → ℝ as a vector: e, r⁻¹, r⁻², …, s, sr⁻¹, sr⁻², …"""
        n = self.rotations
        return tuple(Element(mirror, -turns % n) for mirror in (0, 1) for turns in range(n))

    def regular(self, g: Element) -> Tensor:
        """ρ_reg(g), the permutation matrix of `[ρ_reg(g)φ](h) = φ(g⁻¹h)`."""
        position = {h: i for i, h in enumerate(self.regular_order)}
        matrix = torch.zeros(self.order, self.order, dtype=torch.float64, device="cpu")
        for row, h in enumerate(self.regular_order):
            matrix[row, position[self.product(self.inverse(g), h)]] = 1
        return matrix

    def isotypic(self, g: Element) -> Tensor:
        """ρ_iso(g) = ⊕ d_ρ ρ(g): every irrep, as often as its dimension."""
        return torch.block_diag(*(irrep.matrix(g) for irrep in self.irreps for _ in range(irrep.dim)))

    @property
    def fourier_matrix(self) -> Tensor:
        """Q_reg of the paper, the orthogonal matrix with ρ_reg(g) = Q_reg ρ_iso(g) Q_regᵀ.

        Row h, copy i of irrep ρ:  √(d_ρ/|G|) uᵢᵀ ρ(h⁻¹),  with u₁, u₂ the orthonormal pair (1, ±1)/√2 that
        the paper chose for E.
        """
        rows = []
        for h in self.regular_order:
            row = []
            for irrep in self.irreps:
                probes = [[1.0]] if irrep.dim == 1 else [[sqrt(0.5), sqrt(0.5)], [sqrt(0.5), -sqrt(0.5)]]
                u = torch.tensor(probes, dtype=torch.float64, device="cpu")
                rho = irrep.matrix(self.inverse(h))
                row.append((u @ rho).flatten() * sqrt(irrep.dim / self.order))
            rows.append(torch.cat(row))
        return torch.stack(rows)

    @property
    def flop_reduction(self) -> float:
        """How many times fewer multiplications an equivariant linear layer needs: |G|² / Σ d_ρ³.

        This is 4n²/(2n−1) for the group of order 4n, so 16/3 for D8, and 2 for the mirror group.
        """
        return self.order**2 / sum(irrep.dim**3 for irrep in self.irreps)


def _irreps(rotations: int) -> tuple[Irrep, ...]:
    """The irreps in the paper's bases: A1, A2, then B1, B2 for an even number of rotations, then the E."""
    one, minus = ((1.0,),), ((-1.0,),)
    irreps = [Irrep("A1", one, one), Irrep("A2", one, minus)]
    if rotations % 2 == 0:
        irreps += [Irrep("B1", minus, one), Irrep("B2", minus, minus)]
    count = (rotations - 1) // 2
    for j in range(1, count + 1):
        angle = 2 * pi * j / rotations
        # A quarter turn must be exact, not 6e-17 away from it.
        c, s = (0.0 if abs(v) < 1e-12 else v for v in (cos(angle), sin(angle)))
        irreps.append(Irrep("E" if count == 1 else f"E{j}", ((c, -s), (s, c)), ((-1.0, 0.0), (0.0, 1.0))))
    return tuple(irreps)


D2 = DihedralGroup(2)
"""The mirror group, of two elements."""
D8 = DihedralGroup(8)
"""The octic group: the rotations and mirrorings of a square."""
