"""Layer norm and layer scale."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quickvit.group import D8, DihedralGroup, Layout
from quickvit.ops import octic_layer_norm, octic_residual_norm
from quickvit.ops.rows import Rows


class OcticLayerNorm(nn.Module):
    """Centres each irrep, divides by the norm over all irreps, applies a gain, and a shift on A1.

    σ² = (v_A1 + v_A2 + v_B1 + v_B2 + 2(v_E1 + v_E2)) / 8 for D8, so that unit variance stays unit variance. The
    authors' released weights were trained with ½ in place of the 2 and with ε inside the sum: `released=True`.
    """

    def __init__(
        self, dim: int, eps: float = 1e-6, released: bool = False, group: DihedralGroup = D8
    ) -> None:
        super().__init__()
        self.layout = Layout(dim, group)
        self.released = released
        self.pair_weight = 0.25 if released else 1.0
        self.eps = eps / group.order if released else eps
        self.weight = nn.Parameter(torch.empty(self.layout.gains))
        self.bias = nn.Parameter(torch.empty(self.layout.copies))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Unit gain, zero shift."""
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise a packed tensor [..., C]."""
        return octic_layer_norm(
            x, self.weight, self.bias, self.eps, self.layout, pair_weight=self.pair_weight
        )

    def after_residual(
        self,
        x: Tensor,
        branch: Tensor,
        bias: Tensor | None = None,
        scale: Tensor | None = None,
        sample_scale: Tensor | None = None,
        added: Rows | None = None,
        normed: Rows | None = None,
        overwrite: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The residual sum z = x + sample_scale · scale · (branch + bias) and its norm, in one pass.

        Of tokens that were left out, and of `overwrite`, see `octic_residual_norm`.
        """
        return octic_residual_norm(
            x,
            branch,
            self.weight,
            self.bias,
            self.eps,
            self.layout,
            bias=bias,
            scale=scale,
            sample_scale=sample_scale,
            added=added,
            normed=normed,
            pair_weight=self.pair_weight,
            overwrite=overwrite,
        )

    def extra_repr(self) -> str:
        """Width, ε and group."""
        released = ", released" if self.released else ""
        return f"{self.layout.channels}, eps={self.eps}, group={self.layout.group}{released}"


class OcticLayerScale(nn.Module):
    """A learnt gain per irrep channel, the components of an irrep sharing theirs."""

    def __init__(self, dim: int, init_values: float = 1e-4, group: DihedralGroup = D8) -> None:
        super().__init__()
        self.layout = Layout(dim, group)
        self.init_values = init_values
        self.gamma = nn.Parameter(torch.empty(self.layout.gains))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The same small value everywhere."""
        nn.init.constant_(self.gamma, self.init_values)

    def forward(self, x: Tensor) -> Tensor:
        """Scale a packed tensor [..., C]."""
        return x * self.layout.expand(self.gamma)
