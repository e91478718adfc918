"""The models of recipes: created for them, started from checkpoints, and saved."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from timm.layers import DropPath
from timm.models.vision_transformer import VisionTransformer, checkpoint_filter_fn
from torch import nn
from torch.distributed.tensor import DTensor

from quickvit.layers import StandardBlock
from quickvit.models import QuickVisionTransformer, ViT, create_model
from quickvit.models.checkpoints import load_weights, read_checkpoint, save_checkpoint, save_weights, stripped
from quickvit.models.standard import require_writable, restore_any, standard_config
from quickvit.train import World

ModelArguments = dict[str, int | float | str | bool | None]
# None is no layer scale, and auto what the recipe or the checkpoint has.
LayerScale = float | Literal["auto"] | None
# What need not come from a checkpoint: other classes need another head, and not everyone hides patches.
REPLACEABLE = ("head.weight", "head.bias", "mask_token.weight")
# Arguments of models, and what says their values in a recipe.
DECIDED = {
    "img_size": "--img-size",
    "num_classes": "the data",
    "drop_path_rate": "--drop-path",
    "uniform_drop_path": "the recipe",
    "drop_path_subset": "the recipe",
    "mask_token": "the recipe",
    "dynamic_img_size": "the recipe",
}
# What decides a Quick ViT's outputs and leaves no trace in the shapes of its weights; the last goes with the pooling.
UNSEEN = ("released_norm", "global_pool", "fc_norm")


class Architecture(Protocol):
    """What the configurations of recipes say about their model."""

    @property
    def model(self) -> str:
        """Its name."""
        ...

    @property
    def img_size(self) -> int:
        """Side of the images."""
        ...

    @property
    def patch_size(self) -> int | None:
        """Side of the patches."""
        ...

    @property
    def octic_depth(self) -> int | None:
        """Blocks that are octic."""
        ...

    @property
    def invariant(self) -> str | None:
        """The invariant of a d8 or i8."""
        ...

    @property
    def lift(self) -> Literal["octic", "free"] | None:
        """The patch embedding."""
        ...

    @property
    def layer_scale(self) -> LayerScale:
        """Initial layer scale."""
        ...

    @property
    def model_args(self) -> ModelArguments | None:
        """Further arguments."""
        ...


def create(
    config: Architecture,
    classes: int,
    *,
    drop_path: float = 0.0,
    drop_path_subset: bool = False,
    crops: bool = False,
) -> ViT:
    """A fresh model with stochastic depth of the same rate in all blocks.

    drop_path_subset: branches are computed for the samples alone that are kept, see `QuickVisionTransformer`.
    crops: it takes images of any size, and a Quick ViT hides patches.
    """
    ablation = {
        name: value
        for name in ("octic_depth", "invariant", "lift")
        if (value := getattr(config, name)) is not None
    }
    _require_one_place(config, ablation)
    options: dict[str, Any] = {
        "img_size": config.img_size,
        "num_classes": classes,
        **({} if config.layer_scale == "auto" else {"init_values": config.layer_scale}),
        **({"dynamic_img_size": True} if crops else {}),
        **ablation,
        **(config.model_args or {}),
    }
    if config.patch_size is not None:
        options["patch_size"] = config.patch_size
    if config.model.startswith("quickvit_"):
        options |= {"drop_path_rate": drop_path, "uniform_drop_path": True, "mask_token": crops}
        options["drop_path_subset"] = drop_path_subset
    elif ablation:
        raise ValueError(f"{', '.join(ablation)} is for Quick ViTs, {config.model} is none")
    try:
        model = create_model(config.model, **options)
    except TypeError as error:
        raise ValueError(f"cannot build {config.model} with {options}: {error}") from error
    if isinstance(model, QuickVisionTransformer) and config.invariant and model.invariant is None:
        raise ValueError(f"invariant is for d8 and i8, {config.model} has none, got {config.invariant}")
    require_writable(model)
    # A ViT of timm would leave out what is over.
    require_whole_patches("img_size", config.img_size, patch_size(model))
    if isinstance(model, VisionTransformer) and drop_path:
        # timm's own rises from block to block.
        for block in model.blocks:
            block.drop_path1, block.drop_path2 = DropPath(drop_path), DropPath(drop_path)
            if isinstance(block, StandardBlock):
                block.drop_path_subset = drop_path_subset
    return model


def require_whole_patches(name: str, size: int, patch: int) -> None:
    """Refuse images of which a part of a patch is left."""
    if size < 1 or size % patch:
        raise ValueError(f"{name} must be a positive multiple of the {patch} pixels of a patch, got {size}")


def _require_one_place(config: Architecture, given: Mapping[str, Any]) -> None:
    """Refuse further arguments that have an option of their own, or follow from the data."""
    given = {**given, **({} if config.patch_size is None else {"patch_size": config.patch_size})}
    for name, value in (config.model_args or {}).items():
        if name in DECIDED:
            raise ValueError(f"model_args has {name}, which {DECIDED[name]} decides; leave it out there")
        if given.get(name, value) != value:
            raise ValueError(f"{name} is given twice, as {given[name]} and as {value} in model_args")


def build(config: Architecture, classes: int, checkpoint: Path | None = None, **options: Any) -> ViT:
    """A model of `create`, fresh or with the weights of a checkpoint, of any resolution and with any head."""
    if checkpoint is None:
        return create(config, classes, **options)
    state, _ = read_checkpoint(checkpoint)
    state = stripped(state, str(checkpoint))
    model = create(config, classes, **options)
    if isinstance(model, VisionTransformer):
        state = checkpoint_filter_fn(state, model, interpolation="bicubic")
    own = model.state_dict()
    for name in REPLACEABLE:
        if name not in own:
            state.pop(name, None)
        elif name not in state or state[name].shape != own[name].shape:
            state[name] = own[name]
    load_weights(model, state, source=str(checkpoint))
    return model


def started_from(config: Architecture, checkpoint: Path | None) -> dict[str, Any]:
    """The values of a configuration that the checkpoint of a fine-tuning decides, where it and the recipe differ.

    That is whether there is a layer scale; for Quick ViTs also the grid of positions and, unless `model_args` name
    them, layer norm and pooling.
    """
    if checkpoint is None:
        return {}
    state, about = read_checkpoint(checkpoint)
    # timm's name, and that of DeiT III.
    scaled = any(".ls1." in name or ".gamma_1" in name for name in state)
    values: dict[str, Any] = {} if scaled else {"layer_scale": None}
    if about is None and not config.model.startswith("quickvit_"):
        return values
    theirs = restore_any(about, state, str(checkpoint))
    with torch.device("meta"):
        ours = create(config, classes=0)
    _require_same_heads(ours, theirs, checkpoint)
    if isinstance(ours, QuickVisionTransformer) and isinstance(theirs, QuickVisionTransformer):
        given = config.model_args or {}
        taken = {
            name: value
            for name in UNSEEN
            if name not in given and (value := theirs.config[name]) != ours.config[name]
        }
        values["model_args"] = {**given, **taken, "pos_grid": theirs.pos_embed.grid_size}
    return values


def _require_same_heads(ours: ViT, theirs: ViT, checkpoint: Path) -> None:
    """Weights have the same shapes for any number of heads, and another meaning."""
    asked, there = (
        next((module.num_heads for module in model.blocks.modules() if hasattr(module, "num_heads")), None)
        for model in (ours, theirs)
    )
    if ours.embed_dim == theirs.embed_dim and asked != there:
        raise ValueError(
            f"num_heads must be the {there} of {checkpoint}, got {asked}; set num_heads in model_args to {there}"
        )


def save_model(model: nn.Module, path: Path, world: World) -> None:
    """Write a checkpoint of a whole or sharded model; called on all ranks."""
    state = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in model.state_dict().items()
    }
    if not world.main:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(model, QuickVisionTransformer):
        save_checkpoint(model, path, state)
    else:
        assert isinstance(model, VisionTransformer)
        save_weights(state, path, standard_config(model))


def patch_size(model: ViT) -> int:
    """Side of a model's patches."""
    if isinstance(model, QuickVisionTransformer):
        return model.patch_size
    side: int = model.patch_embed.patch_size[0]
    return side
