"""The transformer block."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from quickvit.group import D8, DihedralGroup, Layout
from quickvit.layers.attention import OcticAttention
from quickvit.layers.depth import Kept, keep
from quickvit.layers.hooks import are_called, is_ours, is_watched
from quickvit.layers.mlp import OcticMlp
from quickvit.layers.norm import OcticLayerNorm, OcticLayerScale
from quickvit.ops.norm import residual
from quickvit.ops.packing import Shapes
from quickvit.ops.rows import Rows


class Pending(NamedTuple):
    """A residual branch that is not added yet, so that the next norm can add it in the same pass.

    See `OcticLayerNorm.after_residual`.
    """

    branch: Tensor
    bias: Tensor | None
    scale: Tensor | None
    sample_scale: Tensor | None
    added: Rows | None


def takes_pending(block: nn.Module) -> bool:
    """Whether a block can take what the block before left to add, and leave its own to the next.

    One with hooks cannot: they look at tokens, or free the parameters that are still to be added (FSDP's).
    """
    inside = _inside(block)
    octic = isinstance(inside, OcticBlock) and is_ours(inside)
    return octic and not (is_watched(block) or is_watched(inside))


def hands_over(block: nn.Module, following: nn.Module) -> bool:
    """Whether a block can leave what it has to add to the next one, which is of its kind."""
    alike = type(_inside(block)) is type(_inside(following))
    return alike and takes_pending(block) and takes_pending(following)


def _inside(block: nn.Module) -> nn.Module:
    """A block, or that of torch.compile(block)."""
    return block._modules.get("_orig_mod") or block


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
        self.layout = Layout(dim, group)
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

        With `pending` x and the branch that is left to add are for this block alone, which may overwrite them. A
        block with hooks inside, or with layers that are not ours, leaves nothing to the next, and overwrites nothing
        that they may have kept. `shapes` are those of packed sequences [T, C].
        """
        first, second = (self._keep(x, shapes) for _ in range(2))
        if are_called(*self.children()):
            x = self._layer_by_layer(x, pending, first, second)
            return (x, None) if defer else x
        alone = pending is not None
        if pending is None:
            y = self.norm1(first.of(x))
        else:
            x, y = self.norm1.after_residual(x, *pending, normed=first.rows, overwrite=True)
        pending = _pending(self.attn.deferred(y, first.shapes), self.ls1, first)
        x, y = self.norm2.after_residual(x, *pending, normed=second.rows, overwrite=alone)
        # Where nobody else holds the branch of attention, its memory is free for the perceptron.
        del pending
        pending = _pending(self.mlp.deferred(y, overwrite=True), self.ls2, second)
        return (x, pending) if defer else self.add(x, pending)

    def fuse(self) -> OcticBlock:
        """The same for inference, see `OcticFoldedBlock`; `timm.utils.reparameterize_model` asks for it."""
        from quickvit.layers.folded import OcticFoldedBlock  # it imports this module

        return OcticFoldedBlock(self)

    def add(self, x: Tensor, pending: Pending) -> Tensor:
        """The residual sum that was left to add."""
        branch, bias, scale, samples, added = pending
        return residual(x, branch, self.layout, bias=bias, scale=scale, sample_scale=samples, added=added)

    def _layer_by_layer(self, x: Tensor, pending: Pending | None, first: Kept, second: Kept) -> Tensor:
        """The block by calls of its layers, so that all hooks run, and layers that others have put there."""
        if pending is not None:
            x = self.add(x, pending)
        # Who replaces attention need not know of packed sequences.
        packed = {} if first.shapes is None else {"shapes": first.shapes}
        y = self.attn(self.norm1(first.of(x)), **packed)
        x = self.add(x, Pending(y if self.ls1 is None else self.ls1(y), None, None, first.scale, first.rows))
        y = self.mlp(self.norm2(second.of(x)))
        return self.add(
            x, Pending(y if self.ls2 is None else self.ls2(y), None, None, second.scale, second.rows)
        )

    def _keep(self, x: Tensor, shapes: Shapes | None) -> Kept:
        return keep(x, self.drop_path, training=self.training, subset=self.drop_path_subset, shapes=shapes)


def _pending(branch: tuple[Tensor, Tensor | None], scale: OcticLayerScale | None, kept: Kept) -> Pending:
    return Pending(*branch, None if scale is None else scale.gamma, kept.scale, kept.rows)
