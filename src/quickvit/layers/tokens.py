"""Learned tokens that the group leaves alone: class token, registers, mask token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quickvit.group import D8, DihedralGroup, Layout


class InvariantTokens(nn.Module):
    """Learned tokens that are non-zero on A1 only: () → [count, C]. Parameter: weight [count, C/|G|]."""

    def __init__(self, count: int, embed_dim: int, std: float = 1e-6, group: DihedralGroup = D8) -> None:
        super().__init__()
        self.layout = Layout(embed_dim, group)
        self.std = std
        self.weight = nn.Parameter(torch.empty(count, self.layout.copies))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal values; zeros for std = 0."""
        nn.init.normal_(self.weight, std=self.std)

    def forward(self) -> Tensor:
        """The tokens as packed features."""
        # Through one axis and back, so that the gradient of a single token is laid out as DDP expects: like the
        # weight, not like a part of the padded token.
        weight = self.weight.flatten().view_as(self.weight)
        return self.layout.embed_invariant(weight)
