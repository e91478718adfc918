"""What models say of themselves in timm's words: `pretrained_cfg`, of which checkpoints keep a part."""

from __future__ import annotations

from typing import Any

from torch import nn

# The names of a model's classes.
LABELS = "label_names"
# How images are resized, and cut out.
INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")
# What torch.compile, DDP and DataParallel call the model that they wrap.
WRAPPERS = ("_orig_mod", "module")


def unwrapped(model: nn.Module) -> Any:
    """The model within what torch.compile, DDP and DataParallel have put around it."""
    while inner := next((getattr(model, name) for name in WRAPPERS if hasattr(model, name)), None):
        model = inner
    return model


def declared(model: nn.Module) -> dict[str, Any]:
    """All that a model says; nothing for one that timm did not make."""
    return getattr(unwrapped(model), "pretrained_cfg", None) or {}


def declare(model: nn.Module, **words: Any) -> None:
    """Let a model say this too."""
    config: Any = {**declared(model), **words}
    model = unwrapped(model)
    model.pretrained_cfg = model.default_cfg = config
