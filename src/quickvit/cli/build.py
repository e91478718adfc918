"""Models and devices from the words of a command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

from quickvit.models import QuickVisionTransformer, ViT, create_model
from quickvit.models.checkpoints import load_weights, read_checkpoint, restore

# The file of a run with the trained model.
RESULT = "model.safetensors"
# What makes a checkpoint a model of another name.
ARCHITECTURE = ("family", "embed_dim", "depth", "num_heads", "patch_size")


def build(
    name: str,
    checkpoint: str | None = None,
    *,
    img_size: tuple[int, int] | None = None,
    turning: bool = False,
) -> ViT:
    """The model of this name, with a checkpoint's weights; `turning` lets it take images turned by 90°."""
    state, config = (None, None) if checkpoint is None else read_checkpoint(checkpoint)
    if state is not None and config is not None:
        _check_same(name, config, checkpoint)
        model: ViT = restore(config, state, str(checkpoint))
    else:
        # timm's ViT takes images of a size other than its own, turned ones too, only if told so at the start.
        model = create_model(name, **{} if name.startswith("quickvit_") else {"dynamic_img_size": turning})
        if state is not None:
            load_weights(model, state, source=str(checkpoint))
    if img_size is not None:
        patch = (
            model.patch_size if isinstance(model, QuickVisionTransformer) else model.patch_embed.patch_size[0]
        )
        if any(side < patch or side % patch for side in img_size):
            raise ValueError(
                f"an image of {img_size[0]}×{img_size[1]} pixels has no whole patches of {patch}"
            )
        model.set_input_size(img_size)
    return model


def load_trained(path: str | Path, name: str | None = None) -> ViT:
    """The model of a checkpoint, or of a run from its folder; `name` for weights that do not say whose they are."""
    folder = Path(path) if Path(path).is_dir() else None
    file = str(path) if folder is None else str(folder / RESULT)
    if name is not None:
        return build(name, file, turning=True)
    state, config = read_checkpoint(file)
    if config is not None:
        return restore(config, state, file)
    if folder is None:
        raise ValueError(f"{file} does not say which model it is; give its name with --model")
    from quickvit.cli.train import rebuild  # it imports this module

    model = rebuild(folder).modules["model"]
    load_weights(model, state, source=file)
    assert isinstance(model, ViT)
    return model


def parse_size(text: str) -> tuple[int, int]:
    """Height and width."""
    match = re.fullmatch(r"(\d+)(?:x(\d+))?", text)
    if match is None:
        raise ValueError(f"an image size is H or HxW, got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def choose_device(name: str | None) -> torch.device:
    """The device of this name; by default CUDA where there is one."""
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use the device {name!r}: {str(error).splitlines()[0]}") from error
    return device


def _check_same(name: str, config: dict[str, Any], checkpoint: str | None) -> None:
    """Refuse a checkpoint of another architecture than the name says."""
    with torch.device("meta"):
        expected = getattr(create_model(name), "config", {})
    differing = [key for key in ARCHITECTURE if config.get(key) != expected.get(key)]
    if differing:
        found = ", ".join(f"{key} {config.get(key)} instead of {expected.get(key)}" for key in differing)
        raise ValueError(f"{checkpoint} is not a {name}: {found}")
