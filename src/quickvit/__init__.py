"""Vision transformers that commute with rotations and mirrorings, and are faster for it.

Importing this package registers its models with timm: `timm.create_model("quickvit_h8_base_patch16_224")`.
"""

from quickvit.group import (
    D2,
    D8,
    DihedralGroup,
    Element,
    Layout,
    act_on_features,
    act_on_image,
    act_on_tokens,
)
from quickvit.models import (
    CheckpointError,
    QuickVisionTransformer,
    SteerableTokens,
    convert_file,
    create_baseline,
    load_checkpoint,
    save_checkpoint,
)

__version__ = "0.1.0"

__all__ = [
    "D2",
    "D8",
    "CheckpointError",
    "DihedralGroup",
    "Element",
    "Layout",
    "QuickVisionTransformer",
    "SteerableTokens",
    "act_on_features",
    "act_on_image",
    "act_on_tokens",
    "convert_file",
    "create_baseline",
    "load_checkpoint",
    "save_checkpoint",
]
