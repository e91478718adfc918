"""How a model wants its images: what its timm configuration says, at the size that it has now."""

from __future__ import annotations

from typing import Any

from timm.data.config import resolve_data_config
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from quickvit.data.transforms import EvalTransform
from quickvit.models import QuickVisionTransformer
from quickvit.models.declared import declare, declared, unwrapped


def input_size(model: nn.Module) -> tuple[int, int, int]:
    """Channels, height and width of the images that a Quick ViT or a ViT of timm expects."""
    inner = unwrapped(model)
    if isinstance(inner, QuickVisionTransformer):
        height, width = inner.img_size
        return inner.in_chans, height, width
    if isinstance(inner, VisionTransformer) and inner.patch_embed.img_size is not None:
        height, width = inner.patch_embed.img_size
        return inner.patch_embed.proj.in_channels, height, width
    raise ValueError(f"expected a Quick ViT or a ViT of timm with an image size, got {type(model).__name__}")


def preprocessing(model: nn.Module) -> EvalTransform:
    """The evaluation transform of a model; one that declares nothing sees the whole image, in ImageNet's colours."""
    channels, height, width = input_size(model)
    if channels != 3:
        raise ValueError(f"images are read as RGB, but the model wants {channels} channels")
    found: dict[str, Any] = resolve_data_config({"crop_pct": 1.0, **declared(model)}, use_test_size=False)
    return EvalTransform(
        (height, width),
        interpolation=found["interpolation"],
        mean=found["mean"],
        std=found["std"],
        crop_ratio=found["crop_pct"],
        crop_mode=found["crop_mode"],
    )


def declare_preprocessing(model: nn.Module, transform: EvalTransform) -> None:
    """Make this the evaluation transform of a model, also of its checkpoints; the size is the model's own."""
    declare(
        model,
        interpolation=transform.interpolation,
        mean=transform.mean,
        std=transform.std,
        crop_pct=transform.crop_ratio,
        crop_mode=transform.crop_mode,
    )
