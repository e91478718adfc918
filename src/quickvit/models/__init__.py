"""The model family, its named variants, and their checkpoints."""

from quickvit.models.checkpoints import load_checkpoint, save_checkpoint
from quickvit.models.quick_vit import FAMILIES, QuickVisionTransformer, SteerableTokens
from quickvit.models.zoo import SIZES, create_baseline

__all__ = [
    "FAMILIES",
    "SIZES",
    "QuickVisionTransformer",
    "SteerableTokens",
    "create_baseline",
    "load_checkpoint",
    "save_checkpoint",
]
