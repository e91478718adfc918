"""A frozen Quick ViT or ViT of timm, and the features of its last layers."""

from __future__ import annotations

from hashlib import blake2b
from inspect import signature
from typing import Any

import torch
from timm.data.config import resolve_data_config
from torch import Tensor, nn

from quickvit.data import EvalTransform
from quickvit.models import QuickVisionTransformer
from quickvit.models.declared import declared, unwrapped

# As many last layers as DINOv2's linear probe sees at most.
LAYERS = 4


class Backbone:
    """A model in evaluation mode on a device.

    The weights become float32, whatever they were. name: for messages. dtype: float32, or bfloat16 for autocast;
    features have this type too.
    """

    def __init__(
        self,
        model: nn.Module,
        name: str,
        *,
        device: str | torch.device = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        model = unwrapped(model)
        intermediates = getattr(model, "forward_intermediates", None)
        if intermediates is None or "return_prefix_tokens" not in signature(intermediates).parameters:
            raise ValueError(
                f"{name} is no vision transformer: its forward_intermediates gives no prefix tokens; "
                "use a Quick ViT or a ViT of timm"
            )
        if getattr(getattr(model, "patch_embed", None), "img_size", getattr(model, "img_size", None)) is None:
            raise ValueError(f"{name} has no fixed image size; create it with img_size")
        self.device, self.dtype, self.name = torch.device(device), dtype, name
        self.model: Any = model.to(self.device, torch.float32).eval().requires_grad_(False)

    @property
    def architecture(self) -> str:
        """timm's name of the architecture, or what kind of model it is."""
        return declared(self.model).get("architecture") or type(self.model).__name__

    @property
    def img_size(self) -> tuple[int, int]:
        """Height and width of the images that the model expects."""
        quick = isinstance(self.model, QuickVisionTransformer)
        height, width = self.model.img_size if quick else self.model.patch_embed.img_size
        return height, width

    @property
    def layers(self) -> int:
        """How many last layers have features like the last one's: those after the octic part."""
        depth = len(self.model.blocks)
        quick = isinstance(self.model, QuickVisionTransformer)
        return depth - max(self.model.octic_depth - 1, 0) if quick else depth

    def transform(self, crop_ratio: float = 1.0, crop_mode: str = "center") -> EvalTransform:
        """Images at the model's size and in its colours, cut out as a protocol wants it; bicubic, as in DINOv2."""
        colours: dict[str, Any] = resolve_data_config(
            {"mean": None, **declared(self.model)}, use_test_size=False
        )
        return EvalTransform(
            self.img_size,
            mean=colours["mean"],
            std=colours["std"],
            crop_ratio=crop_ratio,
            crop_mode=crop_mode,
        )

    def pooled(self, images: Tensor) -> dict[str, Tensor]:
        """Vectors [B, C] of images: class_1 … class_4 of the last layers, last first, and the last one's average.

        A model without a class token has only the average; one with fewer layers after the octic part fewer
        class tokens.
        """
        tokens = self._tokens(images, min(LAYERS, self.layers))
        vectors = {
            f"class_{i}": self._finish(prefix[:, 0])
            for i, (_, prefix) in enumerate(reversed(tokens), 1)
            if prefix is not None
        }
        return {**vectors, "average": self._finish(tokens[-1][0].mean((2, 3)))}

    def dense(self, images: Tensor) -> dict[str, Tensor]:
        """The features of the patches [B, H, W, C] of the last layer, as "patches"."""
        return {"patches": self._finish(self._tokens(images, 1)[-1][0].permute(0, 2, 3, 1))}

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the features besides the images: structure and weights without the head, and precision."""
        config = getattr(self.model, "config", {})
        settings = {key: config[key] for key in sorted(config) if key not in ("num_classes", "global_pool")}
        parts = [part for part in self.model.named_children() if not part[0].startswith("head")]
        digest = blake2b(f"{settings} {parts}".encode(), digest_size=16)
        for key, tensor in sorted(self.model.state_dict().items()):
            if not key.startswith("head"):
                digest.update(f"{key} {tuple(tensor.shape)} {tensor.dtype}".encode())
                digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        return {"model": self.architecture, "weights": digest.hexdigest(), "dtype": str(self.dtype)}

    @torch.inference_mode()
    def _tokens(self, images: Tensor, layers: int) -> list[tuple[Tensor, Tensor | None]]:
        """Patch tokens [B, C, H, W] and, if there is a class token, prefix tokens [B, P, C] of the last layers."""
        prefix = bool(self.model.num_prefix_tokens)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == torch.bfloat16):
            outputs = self.model.forward_intermediates(
                images.to(self.device),
                indices=layers,
                return_prefix_tokens=prefix,
                norm=True,
                intermediates_only=True,
            )
        has_class = getattr(self.model, "cls_token", None) is not None
        pairs = outputs if prefix else [(patches, None) for patches in outputs]
        return [(patches, first if has_class else None) for patches, first in pairs]

    def _finish(self, features: Tensor) -> Tensor:
        """Features after the last norm, wherever the model has it: timm's average pooling puts it behind."""
        if isinstance(self.model.norm, nn.Identity):
            with torch.inference_mode():
                features = self.model.fc_norm(features.float())
        return features.to(self.dtype)
