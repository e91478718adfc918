"""timm's transformer block and attention, with what octic blocks have."""

from __future__ import annotations

from collections.abc import Callable

from timm.layers import Attention
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from quickvit.layers.depth import keep
from quickvit.layers.hooks import is_idle
from quickvit.ops.packing import Shapes, attend, pack, unpack
from quickvit.ops.standard import attention


class StandardBlock(Block):
    """timm's block, which also takes packed sequences and computes branches of subsets.

    drop_path_subset: stochastic depth leaves samples out of the computation, see `depth`.
    """

    drop_path_subset = False

    def forward(
        self,
        x: Tensor,
        attn_mask: Tensor | None = None,
        is_causal: bool = False,
        shapes: Shapes | None = None,
    ) -> Tensor:
        """Apply the block; `shapes` are those of packed sequences, which take no mask."""
        masked = attn_mask is not None or is_causal
        if shapes is None and (masked or not (self.drop_path_subset and self.training)):
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)

        def attend(y: Tensor, shapes: Shapes | None) -> Tensor:
            return self.ls1(self._attend(self.norm1(y), shapes))

        def mlp(y: Tensor, _: Shapes | None) -> Tensor:
            return self.ls2(self.mlp(self.norm2(y)))

        x = self._add(x, attend, self.drop_path1, shapes)
        return self._add(x, mlp, self.drop_path2, shapes)

    def _add(
        self,
        x: Tensor,
        branch: Callable[[Tensor, Shapes | None], Tensor],
        drop_path: nn.Module,
        shapes: Shapes | None,
    ) -> Tensor:
        """x plus a branch of it, which some samples skip in training."""
        rate = getattr(drop_path, "drop_prob", 0.0)
        kept = keep(x, rate, training=self.training, subset=self.drop_path_subset, shapes=shapes)
        return kept.add(x, branch(kept.of(x), kept.shapes))

    def _attend(self, x: Tensor, shapes: Shapes | None) -> Tensor:
        attn = self.attn
        if shapes is None:
            return attn(x)
        if type(attn) not in (Attention, StandardAttention) or attn.gate is not None:
            return pack([attn(batch) for batch in unpack(x, shapes)])[0]
        return _attention(attn, x, shapes)


class StandardAttention(Attention):
    """timm's attention, by kernels of ours where there are some; timm's models, to compare with, have PyTorch's."""

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """[B, N, C] → [B, N, C]."""
        if attn_mask is not None or is_causal or not (self.fused_attn and _is_plain(self)):
            return super().forward(x, attn_mask=attn_mask, is_causal=is_causal)
        return _attention(self, x, None)


def _is_plain(attn: Attention) -> bool:
    """Whether nothing comes between q, k, v and their attention, nor after it."""
    return attn.gate is None and is_idle(attn.q_norm) and is_idle(attn.k_norm)


def _attention(attn: Attention, x: Tensor, shapes: Shapes | None) -> Tensor:
    """Attention; of packed sequences products are of all tokens at once."""
    dropout = attn.attn_drop.p if attn.training else 0.0

    def heads(qkv: Tensor) -> Tensor:
        if type(attn) is StandardAttention and _is_plain(attn):
            return attention(qkv, dropout=dropout)
        q, k, v = qkv.permute(2, 0, 1, 3, 4)
        return attend(attn.q_norm(q), attn.k_norm(k), v, dropout=dropout)

    qkv = attn.qkv(x).unflatten(-1, (3, attn.num_heads, -1))
    out = heads(qkv) if shapes is None else pack([heads(batch) for batch in unpack(qkv, shapes)])[0]
    return attn.proj_drop(attn.proj(attn.norm(out.flatten(-2))))
