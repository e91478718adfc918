"""The model family, its named variants, and their checkpoints."""

from quickvit.models.checkpoints import CheckpointError, load_checkpoint, save_checkpoint
from quickvit.models.convert import convert_file, convert_released
from quickvit.models.quick_vit import FAMILIES, QuickVisionTransformer, SteerableTokens
from quickvit.models.zoo import SIZES, ViT, create_baseline, create_model

__all__ = [
    "FAMILIES",
    "SIZES",
    "CheckpointError",
    "QuickVisionTransformer",
    "SteerableTokens",
    "ViT",
    "convert_file",
    "convert_released",
    "create_baseline",
    "create_model",
    "load_checkpoint",
    "save_checkpoint",
]
