"""The two-layer perceptron of a block."""

from __future__ import annotations

from torch import Tensor, nn

from quickvit.group import D8, DihedralGroup
from quickvit.layers.dropout import OcticDropout
from quickvit.layers.linear import OcticLinear
from quickvit.ops import octic_gelu


class OcticMlp(nn.Module):
    """Linear, GELU through the regular domain, linear: [..., C] → [..., C]."""

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0, group: DihedralGroup = D8) -> None:
        super().__init__()
        self.group = group
        self.fc1 = OcticLinear(dim, hidden_dim, group=group)
        self.drop1 = OcticDropout(hidden_dim, drop, group)
        self.fc2 = OcticLinear(hidden_dim, dim, group=group)
        self.drop2 = OcticDropout(dim, drop, group)

    def forward(self, x: Tensor) -> Tensor:
        """Apply to packed tokens."""
        return self.drop2(self.fc2(self._hidden(x)))

    def deferred(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """As forward, with a bias that is left to add, see `OcticLinear.deferred`."""
        if self.training and self.drop2.p:
            return self(x), None
        return self.fc2.deferred(self._hidden(x))

    def _hidden(self, x: Tensor) -> Tensor:
        hidden, bias = self.fc1.deferred(x)
        return self.drop1(octic_gelu(hidden, bias, self.group, overwrite=True))
