"""The transformer block."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from quickvit.group import D8, DihedralGroup
from quickvit.layers.attention import OcticAttention
from quickvit.layers.depth import Subset, draw_subset, sample_scale
from quickvit.layers.mlp import OcticMlp
from quickvit.layers.norm import OcticLayerNorm, OcticLayerScale
from quickvit.ops.norm import residual
from quickvit.ops.packing import Shapes


class Pending(NamedTuple):
    """A residual branch that is not added yet, so that the next norm can add it in the same pass."""

    branch: Tensor
    bias: Tensor | None
    scale: Tensor | None
    sample_scale: Tensor | None


class OcticBlock(nn.Module):
    """x ← x + MHA(LN(x)), x ← x + MLP(LN(x)): [B, N, C] → [B, N, C].

    drop_path_subset: stochastic depth leaves samples out of the computation, see `depth`.
    """

    drop_path_subset = False

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        init_values: float | None = None,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
        released_norm: bool = False,
        group: DihedralGroup = D8,
    ) -> None:
        super().__init__()
        self.drop_path = drop_path
        self.norm1 = OcticLayerNorm(dim, norm_eps, released_norm, group)
        self.attn = OcticAttention(dim, num_heads, qkv_bias, attn_drop, proj_drop, group)
        self.ls1 = OcticLayerScale(dim, init_values, group) if init_values is not None else None
        self.norm2 = OcticLayerNorm(dim, norm_eps, released_norm, group)
        self.mlp = OcticMlp(dim, round(dim * mlp_ratio), proj_drop, group)
        self.ls2 = OcticLayerScale(dim, init_values, group) if init_values is not None else None

    def forward(
        self,
        x: Tensor,
        pending: Pending | None = None,
        *,
        defer: bool = False,
        shapes: Shapes | None = None,
    ) -> Tensor | tuple[Tensor, Pending | None]:
        """Apply the block; `pending` is what the block before left to add, and `defer` leaves ours to the next.

        `shapes` are those of packed sequences [T, C].
        """
        if self.drop_path_subset and self.training and self.drop_path:
            x = self._of_subsets(x if pending is None else self.add(x, pending), shapes)
            return (x, None) if defer else x
        if pending is None:
            y = self.norm1(x)
        else:
            x, y = self.norm1.after_residual(x, *pending)
        branch = self.attn.deferred(y, shapes)
        x, y = self.norm2.after_residual(x, *self._pending(x, branch, self.ls1, shapes))
        pending = self._pending(x, self.mlp.deferred(y), self.ls2, shapes)
        return (x, pending) if defer else self.add(x, pending)

    def add(self, x: Tensor, pending: Pending) -> Tensor:
        """The residual sum that was left to add."""
        branch, bias, scale, samples = pending
        return residual(x, branch, self.norm1.layout, bias=bias, scale=scale, sample_scale=samples)

    def _of_subsets(self, x: Tensor, shapes: Shapes | None) -> Tensor:
        """The block, each branch computed for a random subset of the samples."""
        kept = draw_subset(x, self.drop_path, shapes)
        x = self._add_subset(x, kept, self.attn.deferred(self.norm1(kept.of(x)), kept.shapes), self.ls1)
        kept = draw_subset(x, self.drop_path, shapes)
        return self._add_subset(x, kept, self.mlp.deferred(self.norm2(kept.of(x))), self.ls2)

    def _add_subset(
        self, x: Tensor, kept: Subset, branch: tuple[Tensor, Tensor | None], scale: OcticLayerScale | None
    ) -> Tensor:
        y, bias = branch
        if bias is not None:
            y = y + self.norm1.layout.embed_invariant(bias)
        return kept.add(x, y if scale is None else scale(y))

    def _pending(
        self,
        x: Tensor,
        branch: tuple[Tensor, Tensor | None],
        scale: OcticLayerScale | None,
        shapes: Shapes | None,
    ) -> Pending:
        gamma = None if scale is None else scale.gamma
        return Pending(*branch, gamma, sample_scale(x, self.drop_path, self.training, shapes))
