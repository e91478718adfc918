"""The named variants, as data: `timm.create_model("quickvit_h8_large_patch16_224")`."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import timm
import torch
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import (
    build_model_with_cfg,
    generate_default_cfgs,
    is_model_in_modules,
    register_model,
)
from timm.models.vision_transformer import Block, VisionTransformer
from torch import Tensor

from quickvit.layers import OcticPosition, StandardBlock
from quickvit.models.declared import declare, declared
from quickvit.models.quick_vit import FAMILIES, QuickVisionTransformer


@dataclass(frozen=True)
class Size:
    """Width, depth, heads and width of the MLP."""

    embed_dim: int
    depth: int
    num_heads: int
    mlp_dim: int

    def arguments(self) -> dict[str, Any]:
        """As keyword arguments of a model."""
        ratio = self.mlp_dim / self.embed_dim
        return {
            "embed_dim": self.embed_dim,
            "depth": self.depth,
            "num_heads": self.num_heads,
            "mlp_ratio": ratio,
        }


SIZES: dict[str, Size] = {
    "tiny": Size(192, 12, 3, 768),
    "small": Size(384, 12, 6, 1536),
    "base": Size(768, 12, 12, 3072),
    "large": Size(1024, 24, 16, 4096),
    "huge": Size(1280, 32, 16, 5120),
    "giant": Size(1664, 48, 16, 8192),
    "e": Size(1792, 56, 16, 15360),
    "22b": Size(6144, 48, 48, 24576),
}
"""Sizes of the literature (Dosovitskiy et al.; Touvron et al.; Zhai et al.; Dehghani et al.)."""
PATCHES = (14, 16)
# DeiT III's layer scale; every model of the paper has one.
LAYER_SCALE = 1e-4


def create_baseline(size: str, patch_size: int = 16, **kwargs: Any) -> VisionTransformer:
    """timm's standard ViT of the same size and with the same extras (layer scale, no position on the class token)."""
    if size not in SIZES:
        raise ValueError(f"unknown size {size!r}; expected one of {', '.join(SIZES)}")
    arguments = {**SIZES[size].arguments(), "init_values": LAYER_SCALE, "no_embed_class": True}
    return _with_packing(VisionTransformer(patch_size=patch_size, **{**arguments, **kwargs}))


ViT = QuickVisionTransformer | VisionTransformer
"""A Quick ViT or a standard one."""
# The entry of a standard ViT's configuration that has its name.
STANDARD = "standard"
# Arguments of timm's that say where weights come from and lie, not what the model is.
_OF_WEIGHTS = (
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "device",
    "dtype",
)
# The modules of timm whose models are its VisionTransformer.
VIT_MODULES = ("vision_transformer", "deit")
# Named apart from timm's own ViTs, whose sizes of the same name differ.
BASELINES = {f"baseline_{size}_patch{patch}_224": (size, patch) for size in SIZES for patch in PATCHES}


def create_model(name: str, **options: Any) -> ViT:
    """A registered Quick ViT, a baseline (`baseline_large_patch16_224`) or a ViT of timm, by its name.

    Standard ViTs get a `config` too, of what they were created with, so that their checkpoints can say it.
    """
    if name in BASELINES:
        size, patch = BASELINES[name]
        model: ViT = create_baseline(size, **{"patch_size": patch, **options})
    else:
        _require_vit(name)
        created = _create_by_timm(name, options)
        assert isinstance(created, ViT)
        model = _with_packing(created) if isinstance(created, VisionTransformer) else created
    if isinstance(model, VisionTransformer):
        config: Any = {STANDARD: name, **{key: v for key, v in options.items() if key not in _OF_WEIGHTS}}
        model.config = config
    return model


def _create_by_timm(name: str, options: dict[str, Any]) -> Any:
    """timm's create_model, which leaves out arguments that are None: of init_values, that means no layer scale."""
    if options.get("init_values", 0.0) is not None:
        return timm.create_model(name, **options)
    architecture, _, tag = name.partition(".")
    kept = {name: value for name, value in options.items() if value is not None or name == "init_values"}
    return timm.model_entrypoint(architecture)(pretrained_cfg=tag or None, **kept)


def _with_packing(model: VisionTransformer) -> VisionTransformer:
    """The model, its blocks also taking packed sequences; timm's rarer kinds of blocks stay as they are."""
    for block in model.blocks:
        if type(block) is Block:
            block.__class__ = StandardBlock
    return model


def _require_vit(name: str) -> None:
    if not timm.is_model(name):
        known = [*timm.list_models("quickvit*"), *BASELINES, *timm.list_models("vit*")]
        close = difflib.get_close_matches(name, known, cutoff=0.5)
        hint = f"did you mean {', '.join(close)}?" if close else "`quickvit models` lists the names"
        raise ValueError(f"unknown model {name!r}; {hint}")
    if not (name.startswith("quickvit_") or is_model_in_modules(name, VIT_MODULES)):
        raise ValueError(f"{name} is neither a Quick ViT nor a ViT of timm")


def _fitted(state: dict[str, Tensor], model: QuickVisionTransformer) -> dict[str, Tensor]:
    """Weights for images of another number of channels or another size, as timm has them.

    timm's own functions are for weights of four dimensions and positions of three, and would leave these to chance.
    """
    _take_positions(state, model)
    return _with_channels(state, model)


def _with_channels(state: dict[str, Tensor], model: QuickVisionTransformer) -> dict[str, Tensor]:
    """Weights for another number of channels: summed for one, else repeated."""
    channels, fitted = model.config["in_chans"], dict(state)
    # Of an octic and of a free lift.
    for name in {"patch_embed.weight", "patch_embed.conv.weight"} & state.keys():
        weight = state[name]
        given = weight.shape[-3]
        if channels == 1:
            fitted[name] = weight.sum(-3, keepdim=True)
        elif channels != given:
            fitted[name] = weight[..., torch.arange(channels) % given, :, :] * (given / channels)
    return fitted


def _take_positions(state: dict[str, Tensor], model: QuickVisionTransformer) -> None:
    """Let a model have the grid on which its weights learned positions, which it resizes to that of its images.

    A grid of 13 and one of 14 have corners of the same shape: which it was follows from the size of their images.
    """
    weight, positions = state.get("pos_embed.weight"), model.pos_embed
    grid = max(declared(model)["input_size"][1:]) // model.patch_size
    if weight is None or model.config["pos_grid"] is not None or grid == positions.grid_size:
        return
    learned = OcticPosition(grid, model.embed_dim, model.group)
    if learned.weight.shape == weight.shape:
        model.pos_embed = learned
        model.config["pos_grid"] = grid


def _register(name: str, family: str, size: str, patch_size: int) -> None:
    """Register a constructor under `name` with timm."""
    arguments = {
        **SIZES[size].arguments(),
        "patch_size": patch_size,
        "family": family,
        "init_values": LAYER_SCALE,
    }

    def create(
        pretrained: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> QuickVisionTransformer:
        out_indices = kwargs.pop("out_indices", 3)
        with nullcontext() if device is None else torch.device(device):
            model = build_model_with_cfg(
                QuickVisionTransformer,
                name,
                pretrained,
                pretrained_filter_fn=_fitted,
                feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
                **{**arguments, **kwargs},
            ).to(dtype=dtype)
        if isinstance(model, QuickVisionTransformer):
            declare(model, input_size=(model.in_chans, *model.img_size))
        return model

    create.__name__ = create.__qualname__ = name
    create.__module__ = __name__
    create.__doc__ = f"ViT-{size.capitalize()}/{patch_size}, {FAMILIES[family].summary}."
    constructor: Callable[..., QuickVisionTransformer] = create
    setattr(sys.modules[__name__], name, register_model(constructor))


_CONFIGURATION = {
    "url": "",
    "num_classes": 1000,
    "input_size": (3, 224, 224),
    "pool_size": None,
    "crop_pct": 1.0,
    "interpolation": "bicubic",
    "mean": IMAGENET_DEFAULT_MEAN,
    "std": IMAGENET_DEFAULT_STD,
    "fixed_input_size": True,
    "classifier": "head",
    "license": "apache-2.0",
}
_NAMES = [(family, size, patch) for family in FAMILIES for size in SIZES for patch in PATCHES]
default_cfgs = generate_default_cfgs(
    {f"quickvit_{family}_{size}_patch{patch}_224": _CONFIGURATION for family, size, patch in _NAMES}
)
for _family, _size, _patch in _NAMES:
    _register(f"quickvit_{_family}_{_size}_patch{_patch}_224", _family, _size, _patch)
