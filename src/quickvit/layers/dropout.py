"""Dropout that commutes with the group."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from quickvit.group import D8, DihedralGroup, Layout


class OcticDropout(nn.Dropout):
    """Dropout with one mask for all components of an irrep, so that a dropped pair turns into a dropped pair."""

    def __init__(self, dim: int, p: float = 0.0, group: DihedralGroup = D8) -> None:
        super().__init__(p)
        self.layout = Layout(dim, group)

    @property
    def drops(self) -> bool:
        """Whether it does anything now."""
        return self.training and self.p > 0

    def forward(self, x: Tensor) -> Tensor:
        """Drop irrep channels of a packed tensor [..., C]."""
        if not self.drops:
            return x
        mask = functional.dropout(x.new_ones(*x.shape[:-1], self.layout.gains), self.p)
        return x * self.layout.expand(mask)

    def extra_repr(self) -> str:
        """Rate and group."""
        return f"{self.layout.channels}, p={self.p}, group={self.layout.group}"
