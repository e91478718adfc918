"""Multi-head self-attention."""

from __future__ import annotations

from torch import Tensor, nn

from quickvit.group import D8, DihedralGroup, Layout
from quickvit.layers.dropout import OcticDropout
from quickvit.layers.hooks import are_called
from quickvit.layers.linear import OcticLinear, Weights, weights_of
from quickvit.ops import octic_attention
from quickvit.ops.packing import Shapes
from quickvit.ops.self_attention import octic_self_attention, takes_self_attention


class OcticAttention(nn.Module):
    """softmax(q kᵀ/√D) v per head: [B, N, C] → [B, N, C].

    Every head holds C/(|G| H) copies of ρ_iso; ρ_iso is orthogonal, so qᵀk is invariant and the weighted sum of
    values equivariant.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        group: DihedralGroup = D8,
    ) -> None:
        super().__init__()
        if dim % (group.order * num_heads):
            raise ValueError(
                f"each head needs whole copies of ρ_iso, so the width must be a multiple of "
                f"{group.order} × num_heads; got width {dim} and num_heads {num_heads}"
            )
        self.num_heads = num_heads
        self.qkv_layout = Layout(3 * dim, group)
        self.qkv = OcticLinear(dim, 3 * dim, bias=qkv_bias, group=group)
        self.attn_drop = attn_drop
        self.proj = OcticLinear(dim, dim, group=group)
        self.proj_drop = OcticDropout(dim, proj_drop, group)

    def forward(self, x: Tensor, shapes: Shapes | None = None) -> Tensor:
        """Attend over the tokens of x; `shapes` are those of packed sequences."""
        if are_called(*self.children()):
            # A hook may change the weights, a part be another: each layer looks at its own when it is called.
            heads = self._attend(self.qkv(x), None, shapes, overwrite=False)
            return self.proj_drop(self.proj(heads))
        qkv, proj = weights_of(self.qkv, self.proj)
        return self.proj_drop(self.proj(self._heads(x, shapes, qkv), proj))

    def deferred(self, x: Tensor, shapes: Shapes | None = None) -> tuple[Tensor, Tensor | None]:
        """As forward, with a bias that is left to add, see `OcticLinear.deferred`."""
        if self.proj_drop.drops:
            return self(x, shapes), None
        qkv, proj = weights_of(self.qkv, self.proj)
        return self.proj.deferred(self._heads(x, shapes, qkv), proj)

    def _heads(self, x: Tensor, shapes: Shapes | None, weights: Weights) -> Tensor:
        group = self.qkv_layout.group
        if not self._dropout and takes_self_attention(x, self.num_heads, group, shapes):
            return octic_self_attention(x, *weights, self.qkv.bias, self.num_heads, shapes=shapes)
        return self._attend(*self.qkv.product(x, weights), shapes, overwrite=True)

    def _attend(self, qkv: Tensor, bias: Tensor | None, shapes: Shapes | None, overwrite: bool) -> Tensor:
        return octic_attention(
            qkv,
            self.num_heads,
            self.qkv_layout,
            bias,
            shapes=shapes,
            dropout=self._dropout,
            overwrite=overwrite,
        )

    @property
    def _dropout(self) -> float:
        return self.attn_drop if self.training else 0.0
