"""Learned positions that commute with the group."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quickvit.group import D8, DihedralGroup, Layout, Unfolding
from quickvit.group.fourier import exact
from quickvit.layers.cache import DerivedTensor


class OcticPosition(DerivedTensor):
    """A learned steerable map e with e = ρ_chan(g) e ρ_token(g)ᵀ, for any grid: (H, W) → [H, W, C].

    The free values, weight [6, C/8, ⌈N/2⌉, ⌈N/2⌉] for D8, are unfolded to an N × N grid and resized to the grid
    asked for by a bicubic filter. Its taps are symmetric, so it commutes with turning and mirroring, and a turned
    H × W grid gets the turned positions.
    """

    def __init__(self, grid_size: int, embed_dim: int, group: DihedralGroup = D8) -> None:
        super().__init__()
        self.layout = Layout(embed_dim, group)
        self.grid_size = grid_size
        self.unfold = Unfolding((grid_size, grid_size), group)
        shape = (self.unfold.num_corners, self.layout.copies, *self.unfold.corner_size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Values such that the unfolded map starts with the 0.02 of a standard ViT."""
        nn.init.trunc_normal_(self.weight, std=0.02 * self.unfold.gain)

    def forward(self, height: int, width: int) -> Tensor:
        """Positions of an H × W grid, [H, W, C]."""
        return self._derive(self.weight, lambda: self._positions(height, width), height, width)

    def _positions(self, height: int, width: int) -> Tensor:
        full = self.unfold(self.weight)
        if (height, width) != self.unfold.size:
            rows, columns = (resize_matrix(self.grid_size, n) for n in (height, width))
            # Positions begin the residual stream, which autocast leaves as precise as the weights.
            with exact(full):
                full = full.new_tensor(rows) @ full @ full.new_tensor(columns).T
        positions = full.permute(1, 2, 0)
        if torch.compiler.is_compiling() and not torch.is_grad_enabled():
            # Every image reads them: with the channels of a token side by side that is several times as fast. The
            # compiler would leave out the copy if nobody asked where its entries lie.
            positions = positions.contiguous()
            positions = positions.as_strided(positions.shape, positions.stride())
        return positions

    def extra_repr(self) -> str:
        """Native grid and width."""
        return f"grid_size={self.grid_size}, embed_dim={self.layout.channels}, group={self.layout.group}"


def resize_matrix(source: int, target: int) -> list[list[float]]:
    """The antialiased bicubic filter from `source` to `target` samples as a matrix, that of torchvision and PIL.

    One matrix for both axes, whose reversal is itself reversed, is what makes resizing commute with the group to
    the last bit of rounding. (PyTorch's own filter does not, for grids that are one token wide.)
    """
    scale = source / target
    stretch = max(scale, 1.0)
    matrix = []
    for i in range(target):
        centre = (i + 0.5) * scale
        row = [_cubic((j + 0.5 - centre) / stretch) for j in range(source)]
        total = sum(row)
        matrix.append([w / total for w in row])
    return matrix


def _cubic(x: float, a: float = -0.5) -> float:
    """Keys' cubic convolution kernel."""
    x = abs(x)
    if x < 1:
        return (a + 2) * x**3 - (a + 3) * x**2 + 1
    return a * (x**3 - 5 * x**2 + 8 * x - 4) if x < 2 else 0.0
