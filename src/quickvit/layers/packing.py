"""Sequences of several lengths in one tensor: batches [Bᵢ, Nᵢ, C] one after the other, [Σ Bᵢ Nᵢ, C].

What acts on single tokens takes them all at once. Attention alone must know where sequences end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from quickvit.layers.dropout import sample_scale

# The number of sequences in each batch, and their length.
Shapes = tuple[tuple[int, int], ...]


def pack(batches: Sequence[Tensor]) -> tuple[Tensor, Shapes]:
    """The batches in one tensor, and their shapes."""
    shapes = tuple((x.shape[0], x.shape[1]) for x in batches)
    return torch.cat([x.flatten(0, 1) for x in batches]), shapes


def unpack(x: Tensor, shapes: Shapes) -> list[Tensor]:
    """The batches as views of the packed tensor."""
    parts = x.split([number * length for number, length in shapes])
    return [part.unflatten(0, shape) for part, shape in zip(parts, shapes, strict=True)]


def each(function: Callable[[Tensor], Tensor], x: Tensor, shapes: Shapes | None) -> Tensor:
    """The function of each batch, packed again; of x itself if it is not packed."""
    return function(x) if shapes is None else pack([function(batch) for batch in unpack(x, shapes)])[0]


class StandardBlock(Block):
    """timm's block, which also takes packed sequences."""

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        shapes: Shapes | None = None,
    ) -> Tensor:
        """Apply the block; `shapes` are those of packed sequences, which take no mask."""
        if shapes is None:
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        x = x + _dropped(self.drop_path1, self.ls1(each(self.attn, self.norm1(x), shapes)), shapes)
        return x + _dropped(self.drop_path2, self.ls2(self.mlp(self.norm2(x))), shapes)


def _dropped(drop_path: nn.Module, branch: Tensor, shapes: Shapes) -> Tensor:
    scale = sample_scale(branch, getattr(drop_path, "drop_prob", 0.0), drop_path.training, shapes)
    return branch if scale is None else branch * scale.to(branch.dtype).unsqueeze(-1)
