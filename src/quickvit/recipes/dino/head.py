"""The head of DINO: from tokens to their similarity with prototypes."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from quickvit.recipes.dino.losses import unit


class DinoHead(nn.Module):
    """Tokens [n, C] → cosines [n, K] with K prototypes: layers with GELU, a bottleneck of unit length, prototypes.

    Prototypes are weight-normalised with length 1, as in DINO where it must be stable. So logits are bounded by 1,
    and no exponential of them overflows.
    """

    def __init__(
        self,
        embed_dim: int,
        prototypes: int = 65536,
        hidden: int = 2048,
        bottleneck: int = 256,
        layers: int = 3,
    ) -> None:
        super().__init__()
        if layers < 1:
            raise ValueError(f"a head needs at least 1 layer, got {layers}")
        widths = [embed_dim, *[hidden] * (layers - 1), bottleneck]
        mlp: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            mlp += [nn.Linear(inputs, outputs), nn.GELU()]
        self.mlp = nn.Sequential(*mlp[:-1])
        self.prototypes = nn.Parameter(torch.empty(prototypes, bottleneck))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """DINO's weights: 0.02 for 2048 inputs, in proportion for others. Prototypes as in DINOv2, as a linear map's.

        With smaller weights the biases, which start at 0, would soon outweigh all differences between tokens. The
        length of prototypes decides how fast they turn: a step of AdamW has the same size whatever it is.
        """
        for layer in self.mlp:
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=0.02 * math.sqrt(2048 / layer.in_features))
                nn.init.zeros_(layer.bias)
        bound = self.prototypes.shape[1] ** -0.5
        nn.init.uniform_(self.prototypes, -bound, bound)

    def forward(self, tokens: Tensor) -> Tensor:
        """Compare tokens with the prototypes."""
        return functional.linear(unit(self.mlp(tokens)), unit(self.prototypes))
