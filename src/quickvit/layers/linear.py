"""The equivariant linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quickvit.group import D8, DihedralGroup, Layout
from quickvit.ops import octic_linear
from quickvit.ops.backend import fused
from quickvit.ops.linear import octic_product
from quickvit.ops.precision import autocast_weights

STANDARD_STD = 0.02
Weights = tuple[Tensor, Tensor]


class OcticLinear(nn.Module):
    """y_ρ = W_ρ x_ρ for each irrep ρ, plus a bias on A1: [..., C] → [..., F].

    Parameters: weight_1 [n1, F/|G|, C/|G|] for the one-dimensional irreps, weight_2 [n2, 2F/|G|, 2C/|G|] for the
    two-dimensional ones, bias [F/|G|]. For D8 that is an eighth of the weights of nn.Linear. A group without
    two-dimensional irreps has no weight_2: optimisers and FSDP stumble over parameters without entries.
    """

    weight_2: nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, group: DihedralGroup = D8
    ) -> None:
        super().__init__()
        self.in_layout = Layout(in_features, group)
        self.out_layout = Layout(out_features, group)
        rows, columns = self.out_layout.copies, self.in_layout.copies
        self.weight_1 = nn.Parameter(torch.empty(group.num_one_dim, rows, columns))
        pairs = torch.empty(group.num_two_dim, 2 * rows, 2 * columns)
        self.register_parameter("weight_2", nn.Parameter(pairs) if group.num_two_dim else None)
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None
        self.reset_parameters()

    def reset_parameters(self, matched: bool = True) -> None:
        """Normal weights and zero bias; `matched` to the variance of a standard layer's output."""
        # A standard layer sums C inputs with weights of 0.02; a block sums only its own C/8 or C/4. Scaling the
        # weights by the square root of that ratio keeps the variance of the output, and so the training recipe.
        for weight in (self.weight_1, self.weight_2):
            if weight is not None:
                std = STANDARD_STD * ((self.in_layout.channels / weight.shape[2]) ** 0.5 if matched else 1.0)
                nn.init.trunc_normal_(weight, std=std, a=-2, b=2)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    @property
    def weights(self) -> Weights:
        """Both weights, the second one without entries where the group has no two-dimensional irreps."""
        if self.weight_2 is not None:
            return self.weight_1, self.weight_2
        _, rows, columns = self.weight_1.shape
        return self.weight_1, self.weight_1.new_empty(0, 2 * rows, 2 * columns)

    def deferred(self, x: Tensor, weights: Weights | None = None) -> tuple[Tensor, Tensor | None]:
        """The layer for callers whose next step can add a bias: its result, and the bias that is left to add.

        A fused next step adds it for free. Otherwise the product adds it to A1, an eighth of its result. Of `weights`
        see `weights_of`.
        """
        if fused(x, self.in_layout.group):
            return octic_linear(x, *(weights or self.weights)), self.bias
        return self(x, weights), None

    def product(self, x: Tensor, weights: Weights) -> tuple[Tensor, Tensor | None]:
        """As `deferred`, for next steps that would have to sum up the gradient of the bias in a pass of its own."""
        if self.bias is not None and fused(x, self.in_layout.group):
            return octic_product(x, *weights, self.bias)
        return self.deferred(x, weights)

    def forward(self, x: Tensor, weights: Weights | None = None) -> Tensor:
        """Map a packed tensor [..., C] to [..., F]; of `weights` see `weights_of`."""
        return octic_linear(x, *(weights or self.weights), self.bias)

    def extra_repr(self) -> str:
        """Shape and group."""
        layouts = self.in_layout, self.out_layout
        bias = self.bias is not None
        return f"{layouts[0].channels}, {layouts[1].channels}, bias={bias}, group={layouts[0].group}"


def weights_of(*layers: OcticLinear) -> list[Weights]:
    """The weights of layers that are used one after the other, as their products want them, converted together."""
    weights = autocast_weights(*(weight for layer in layers for weight in layer.weights))
    return [*zip(weights[::2], weights[1::2], strict=True)]
