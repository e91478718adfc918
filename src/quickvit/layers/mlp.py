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

    def forward(self, x: Tensor, *, defer_bias: bool = False) -> Tensor:
        """Apply to packed tokens; with defer_bias the caller adds `fc2.bias` itself."""
        x = self.drop1(octic_gelu(self.fc1.product(x), self.fc1.bias, self.group))
        return self.drop2(self.fc2.product(x) if defer_bias else self.fc2(x))
