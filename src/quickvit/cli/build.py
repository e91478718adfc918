"""Models and devices from the words of a command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from jsonargparse import Namespace
from timm.models import is_model_in_modules
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn

from quickvit.models import QuickVisionTransformer, ViT, create_model
from quickvit.models.checkpoints import load_weights, read_checkpoint, stripped
from quickvit.models.standard import restore_any
from quickvit.models.zoo import BASELINES, STANDARD, VIT_MODULES
from quickvit.train.distributed import World

# timm's option.
DYNAMIC = "dynamic_img_size"
# What makes a checkpoint a model of another name.
ARCHITECTURE = ("family", "embed_dim", "depth", "num_heads", "patch_size")


def build(
    name: str,
    checkpoint: str | None = None,
    *,
    img_size: tuple[int, int] | None = None,
) -> ViT:
    """The model of this name, with a checkpoint's weights; it also takes images turned by 90°."""
    state, config = (None, None) if checkpoint is None else read_checkpoint(checkpoint)
    if state is not None and config is not None:
        _check_same(name, config, checkpoint)
        model = restore_any(_turning(config), state, str(checkpoint))
    else:
        options: dict[str, Any] = {} if name.startswith("quickvit_") else {DYNAMIC: True}
        if state is not None:
            state = stripped(state, str(checkpoint))
            # The file's own head, if it has one.
            options["num_classes"] = len(state["head.weight"]) if "head.weight" in state else 0
        model = create_model(name, **options)
        if state is not None:
            if isinstance(model, VisionTransformer):
                state = checkpoint_filter_fn(state, model, interpolation="bicubic")
            load_weights(model, state, source=str(checkpoint))
    return _resized(model, img_size)


def load_model(
    model: str,
    checkpoint: str | None = None,
    *,
    pretrained: bool = False,
    img_size: tuple[int, int] | None = None,
) -> nn.Module:
    """The model of a checkpoint or of the run in a folder; or one of any name, with a checkpoint's or timm's weights.

    Names are those of `create_model` and of all other models of timm.
    """
    path = Path(model)
    if path.exists():
        if checkpoint is not None or pretrained:
            raise ValueError(
                f"{model} has weights already; --checkpoint and --pretrained are for names of models"
            )
        state, config = read_checkpoint(path)
        if config is None:
            raise ValueError(
                f"{path} does not say which model it is; give the name of the model, and the file with --checkpoint"
            )
        return _resized(restore_any(_turning(config), state, model), img_size)
    if len(path.parts) > 1 or path.suffix in (".safetensors", ".pth", ".pt"):
        raise FileNotFoundError(f"no checkpoint at {path}")
    foreign = timm.is_model(model) and not (model.startswith("quickvit_") or model in BASELINES)
    if pretrained and not foreign:
        raise ValueError(f"--pretrained is for timm's models; {model} has no weights there")
    if not foreign or (not pretrained and is_model_in_modules(model, VIT_MODULES)):
        return build(model, checkpoint, img_size=img_size)
    options: dict[str, Any] = {} if img_size is None else {"img_size": img_size}
    try:
        found = timm.create_model(model, pretrained=pretrained, **options)
    except (AssertionError, TypeError) as error:
        raise ValueError(f"{model} cannot take images of {img_size}: {error}") from error
    if img_size is not None:
        embed: Any = found.patch_embed
        _require_whole_patches(img_size, embed.patch_size[0])
    if checkpoint is not None:
        load_weights(found, read_checkpoint(checkpoint)[0], source=checkpoint)
    return found


def _turning(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model that also takes images turned by 90°.

    timm's ViT takes images of a size other than its own only if told so at the start.
    """
    return {**config, DYNAMIC: True} if STANDARD in config else config


def load_named(arguments: Namespace) -> nn.Module:
    """The model that a command line names, with the weights and at the image size that it gives."""
    size = arguments.get("img_size")
    return load_model(
        arguments.model,
        arguments.checkpoint,
        pretrained=arguments.get("pretrained", False),
        img_size=None if size is None else parse_size(size),
    )


def load_announced(arguments: Namespace, world: World | None = None) -> nn.Module:
    """The model of `load_named`; weights that nobody gave are random, the same in all processes, and it is said."""
    if is_random(arguments):
        torch.manual_seed(0)
        if world is None or world.main:
            print("quickvit: no --checkpoint given, the weights are random", file=sys.stderr)
    return load_named(arguments)


def require_vit(model: nn.Module, name: str) -> ViT:
    """The model, for commands that are about ViTs."""
    if not isinstance(model, ViT):
        raise ValueError(f"{name} is neither a Quick ViT nor a ViT of timm")
    return model


def is_random(arguments: Namespace) -> bool:
    """Whether a command line names a model without weights."""
    given = arguments.checkpoint is not None or arguments.get("pretrained", False)
    return not given and not Path(arguments.model).exists()


def _resized(model: ViT, img_size: tuple[int, int] | None) -> ViT:
    if img_size is not None:
        if isinstance(model, QuickVisionTransformer):
            _require_whole_patches(img_size, model.patch_size)
        else:
            _require_whole_patches(img_size, model.patch_embed.patch_size[0])
        model.set_input_size(img_size)
    return model


def _require_whole_patches(img_size: tuple[int, int], patch: int) -> None:
    if any(side < patch or side % patch for side in img_size):
        raise ValueError(f"an image of {img_size[0]}×{img_size[1]} pixels has no whole patches of {patch}")


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
        # The meta device makes tensors too, but computes nothing.
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"cannot use the device {name!r}: {str(error).splitlines()[0]}") from error
    return device


def _check_same(name: str, config: dict[str, Any], checkpoint: str | None) -> None:
    """Refuse a checkpoint of another architecture than the name says."""
    with torch.device("meta"):
        expected = getattr(create_model(name), "config", {})
    keys = (STANDARD,) if STANDARD in config else ARCHITECTURE
    differing = [key for key in keys if config.get(key) != expected.get(key)]
    if differing:
        found = ", ".join(f"{key} {config.get(key)} instead of {expected.get(key)}" for key in differing)
        raise ValueError(f"{checkpoint} is not a {name}: {found}")
