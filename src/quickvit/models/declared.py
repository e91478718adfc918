"""What models say of themselves in timm's words: `pretrained_cfg`, of which checkpoints keep a part."""

from __future__ import annotations

from typing import Any

from torch import nn

# The names of a model's classes.
LABELS = "label_names"


def declared(model: nn.Module) -> dict[str, Any]:
    """All that a model says; nothing for one that timm did not make."""
    return getattr(model, "pretrained_cfg", None) or {}


def declare(model: nn.Module, **words: Any) -> None:
    """Let a model say this too."""
    config: Any = {**declared(model), **words}
    model.pretrained_cfg = model.default_cfg = config
