"""The two-layer perceptron of a block."""

from __future__ import annotations

from torch import Tensor, nn

from quickvit.group import D8, DihedralGroup
from quickvit.layers.dropout import OcticDropout
from quickvit.layers.hooks import are_called
from quickvit.layers.linear import OcticLinear, weights_of
from quickvit.ops import octic_gelu
from quickvit.ops.mlp import octic_mlp, takes_mlp


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
        if are_called(*self.children()):
            return self.drop2(self.fc2(self.drop1(octic_gelu(self.fc1(x), None, self.group))))
        y, bias = self._branch(x, overwrite=False)
        return self.drop2(y if bias is None else y + self.fc2.out_layout.embed_invariant(bias))

    def deferred(self, x: Tensor, overwrite: bool = False) -> tuple[Tensor, Tensor | None]:
        """As forward, with a bias that is left to add, see `OcticLinear.deferred`; of `overwrite` see `octic_mlp`."""
        if self.drop2.drops:
            return self(x), None
        return self._branch(x, overwrite)

    def _branch(self, x: Tensor, overwrite: bool) -> tuple[Tensor, Tensor | None]:
        up, down = weights_of(self.fc1, self.fc2)
        # Not those of `parameters()`: weights may be computed from others.
        used = *up, self.fc1.bias, *down
        if not self.drop1.drops and takes_mlp(x, self.group, *used):
            return octic_mlp(x, *used, overwrite=overwrite), self.fc2.bias
        hidden, bias = self.fc1.product(x, up)
        return self.fc2.deferred(self.drop1(octic_gelu(hidden, bias, self.group, overwrite=True)), down)
