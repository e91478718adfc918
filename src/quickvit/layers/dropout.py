"""Dropout that commutes with the group."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from quickvit.group import D8, DihedralGroup, Layout


class OcticDropout(nn.Module):
    """Dropout with one mask for all components of an irrep, so that a dropped pair turns into a dropped pair."""

    def __init__(self, dim: int, p: float = 0.0, group: DihedralGroup = D8) -> None:
        super().__init__()
        self.layout = Layout(dim, group)
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop irrep channels of a packed tensor [..., C]."""
        if not self.training or not self.p:
            return x
        mask = functional.dropout(x.new_ones(*x.shape[:-1], self.layout.gains), self.p)
        return x * self.layout.expand(mask)

    def extra_repr(self) -> str:
        """Rate and group."""
        return f"{self.layout.channels}, p={self.p}, group={self.layout.group}"


def sample_scale(
    x: Tensor, drop_path: float, training: bool, shapes: tuple[tuple[int, int], ...] | None = None
) -> Tensor | None:
    """Stochastic depth: one factor per sample of x [B, ...], 0 or 1/(1 − p); None where nothing is dropped.

    For packed sequences (see `packing`) it is one factor per token, the same for all tokens of a sequence.
    """
    if not training or not drop_path:
        return None
    keep = 1 - drop_path
    samples = x.shape[0] if shapes is None else sum(number for number, _ in shapes)
    scale = torch.empty(samples, device=x.device, dtype=torch.float32).bernoulli_(keep) / keep
    if shapes is None:
        return scale
    parts = zip(scale.split([number for number, _ in shapes]), shapes, strict=True)
    return torch.cat([part.unsqueeze(1).expand(shape).flatten() for part, shape in parts])
