"""A backbone that takes crops of several sizes, with patches hidden, and the tokens of those."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from quickvit.layers import StandardBlock
from quickvit.models import QuickVisionTransformer, ViT
from quickvit.ops.packing import Shapes, pack, unpack


class CropEncoder(nn.Module):
    """Batches of crops [B, 3, H, W], each of its own size → their normalised tokens [B, prefix + patches, C].

    All go through the blocks in one packed pass, unless a ViT of timm has blocks of a rarer kind. A Quick ViT brings
    a token for hidden patches; a ViT of timm is given one here.

    stream: the dtype of the residual stream, see `QuickVisionTransformer.forward_crops`.
    """

    def __init__(self, vit: ViT, stream: torch.dtype | None = None) -> None:
        super().__init__()
        self.stream = stream
        if vit.cls_token is None:
            raise ValueError("self-distillation needs a class token; create the model with class_token=True")
        self.vit = vit
        self.mask_token: nn.Parameter | None = None
        if isinstance(vit, VisionTransformer):
            self.mask_token = nn.Parameter(torch.zeros(vit.embed_dim))
        elif vit.mask_token is None:
            raise ValueError("the Quick ViT has no mask token; create it with mask_token=True")

    def forward(self, crops: Sequence[Tensor], mask: Tensor | None = None) -> list[Tensor]:
        """The tokens of each batch of crops; mask [B, patches] hides patches of the first batch."""
        masks = [mask, *[None] * (len(crops) - 1)]
        if isinstance(self.vit, QuickVisionTransformer):
            return self.vit.forward_crops(crops, masks, self.stream)
        vit = self.vit
        x, shapes = self._embed_crops(vit, crops, masks)
        if not all(isinstance(block, StandardBlock) for block in vit.blocks):
            return [vit.norm(vit.blocks(batch)) for batch in unpack(x, shapes)]
        for block in vit.blocks:
            x = block(x, shapes=shapes)
        return unpack(vit.norm(x), shapes)

    def _embed_crops(
        self, vit: VisionTransformer, crops: Sequence[Tensor], masks: Sequence[Tensor | None]
    ) -> tuple[Tensor, Shapes]:
        x, shapes = pack([self._embed(vit, images, mask) for images, mask in zip(crops, masks, strict=True)])
        return x.to(self.stream or x.dtype), shapes

    def _embed(self, vit: VisionTransformer, images: Tensor, mask: Tensor | None) -> Tensor:
        x = vit.patch_embed(images)
        if mask is not None:
            assert self.mask_token is not None
            x = torch.where(mask.view(*x.shape[:-1], 1), self.mask_token.to(x.dtype), x)
        tokens: Tensor = vit.norm_pre(vit.patch_drop(vit._pos_embed(x)))
        return tokens


class HiddenPatches:
    """Which patches of masks [V, patches] are hidden, as `most` rows whatever their number is, so that shapes stay.

    rows [most]: places among all patches, hidden ones first. counted [most]: whether a row is hidden; the others
    only fill up. weights [most]: 1 / (hidden patches of the same view), 0 for the others.
    """

    def __init__(self, masks: Tensor, most: int, dtype: torch.dtype = torch.float32) -> None:
        flat = masks.flatten()
        self.views, self.patches = masks.shape
        self.rows = flat.to(torch.uint8).argsort(descending=True, stable=True)[:most]
        self.counted = flat[self.rows]
        each = masks.sum(-1).clamp(min=1)
        self.weights = self.counted.to(dtype) / each[self.rows // self.patches]

    def of(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The class tokens [V, C] of tokens [V, prefix + patches, C], the first of each view, and the rows [most, C].

        They are taken in one step, so that their gradient is written once.
        """
        length = tokens.shape[1]
        prefix = length - self.patches
        classes = length * torch.arange(self.views, device=tokens.device)
        hidden = self.rows + prefix * (self.rows // self.patches + 1)
        found = tokens.flatten(0, 1).index_select(0, torch.cat([classes, hidden]))
        return found[: self.views], found[self.views :]
