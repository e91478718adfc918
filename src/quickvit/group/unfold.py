"""Steerable maps on a pixel or token grid, unfolded from their free values on a fundamental corner.

A grid function K with g⁻¹·K = ρ(g) K is fixed by its values on a corner of the grid: the left half for the mirror
group, the top left quarter for the groups of order 4 and 8.
"""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor
from torch.nn import functional

from quickvit.group.actions import act_on_image, quarter_turns
from quickvit.group.dihedral import D8, DihedralGroup


class Unfolding:
    """The linear map from corners [irrep and copy, C/|G|, ..., h, w] to packed maps [C, ..., H, W].

    K_a = √(d/|G|) Σ_g ρ(g)_{a1} g·w for every irrep ρ, copy and component a. The factor makes it an isometry on
    average: K has the squared norm of w.
    """

    def __init__(self, size: tuple[int, int], group: DihedralGroup = D8) -> None:
        if quarter_turns(group) % 2 and size[0] != size[1]:
            raise ValueError(f"{group} turns a grid by 90°, so it must be square; got {size[0]}×{size[1]}")
        height, width = size
        self.size = size
        self.group = group
        self.corner_size = (height if group.order == 2 else (height + 1) // 2), (width + 1) // 2
        # For each packed sub-token: the corner that it comes from, and its coefficient for each element.
        self._source: list[int] = []
        coefficients: list[list[float]] = []
        for irrep in group.irreps:
            first = self._source[-1] + 1 if self._source else 0
            for component in range(irrep.dim):
                column = [irrep.matrix(g)[component, 0].item() for g in group.elements]
                for copy in range(irrep.dim):
                    self._source.append(first + copy)
                    coefficients.append([sqrt(irrep.dim / group.order) * c for c in column])
        self.num_corners = self._source[-1] + 1
        self._coefficients = [list(row) for row in zip(*coefficients, strict=True)]

    def __call__(self, corner: Tensor) -> Tensor:
        """Unfold a corner."""
        (height, width), (h, w) = self.size, self.corner_size
        corners = functional.pad(corner, (0, width - w, 0, height - h)).unbind()
        padded = torch.stack([corners[i] for i in self._source])
        shape = (-1, *[1] * (corner.ndim - 1))
        total = torch.zeros_like(padded)
        for g, row in zip(self.group.elements, self._coefficients, strict=True):
            total = total + corner.new_tensor(row).view(shape) * act_on_image(padded, g, self.group)
        return total.flatten(0, 1)

    @property
    def gain(self) -> float:
        """Root mean square of a corner over that of the map unfolded from it: equal energy on fewer entries."""
        (height, width), (h, w) = self.size, self.corner_size
        return sqrt(height * width / (h * w))
