"""The authors' released checkpoints (davnords/octic-vits: DeiT III and DINOv2, h8 and i8) as Quick ViTs.

The two compute the same, and the conversion only moves numbers: weights stored irrep by irrep are stacked,
positions are divided by the factors of our unfolding, and the standard part of an h8 model takes over our
order of channels.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quickvit.group import D8, Layout
from quickvit.models.checkpoints import (
    CheckpointError,
    read_checkpoint,
    require_suffix,
    restore,
    save_checkpoint,
    strip_wrappers,
)
from quickvit.models.quick_vit import QuickVisionTransformer
from quickvit.models.zoo import LAYER_SCALE, SIZES

# Our name → the released names that it comes from, and how.
Rules: TypeAlias = dict[str, tuple[list[str], Callable[[list[Tensor]], Tensor]]]

HEADS = {size.embed_dim: size.num_heads for size in SIZES.values()}
# Invariant features per C/8 channels → which invariant makes as many.
INVARIANT_WIDTHS = {6: "power_spectrum", 32: "polynomial"}
# Parts of a DINOv2 training checkpoint that are no part of the model.
TRAINING_HEADS = ("dino_head.", "ibot_head.")

_IRREPS = [irrep.name for irrep in D8.irreps]
_ONE_DIM = [irrep.name for irrep in D8.irreps if irrep.dim == 1]
# Released quarters of a map: one for each copy of each irrep.
_LIFTS = [*_ONE_DIM, "E_left", "E_right"]
_LINEARS = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
# Tensors of a standard block and the axis, if any, that runs over the channels of the residual stream.
_STANDARD_BLOCK = {
    "norm1.weight": 0,
    "norm1.bias": 0,
    "attn.qkv.weight": 1,
    "attn.qkv.bias": None,
    "attn.proj.weight": 0,
    "attn.proj.bias": 0,
    "ls1.gamma": 0,
    "norm2.weight": 0,
    "norm2.bias": 0,
    "mlp.fc1.weight": 1,
    "mlp.fc1.bias": None,
    "mlp.fc2.weight": 0,
    "mlp.fc2.bias": 0,
    "ls2.gamma": 0,
}
_NORM = {"norm.weight": 0, "norm.bias": 0}
_HEAD = {"head.weight": 1, "head.bias": None}


def convert_file(source: str | Path, target: str | Path, num_heads: int | None = None) -> None:
    """Read a released checkpoint and write it as one of ours (safetensors)."""
    require_suffix(target)
    state, config = read_checkpoint(source)
    if config is not None:
        raise CheckpointError(f"{source} is a quickvit checkpoint already")
    save_checkpoint(convert_released(state, num_heads, str(source)), target)


def convert_released(
    state: dict[str, Tensor], num_heads: int | None = None, source: str = "the checkpoint"
) -> QuickVisionTransformer:
    """The model of a released state dict: same logits, in the precision of the weights.

    Everything but the number of heads can be read off the tensors; for the widths of the published sizes that
    is known too. The tokens of an h8 model have their channels in our order, released[..., channel_order(C)].
    """
    state = _tidy(state)
    config = _config(state, num_heads, source)
    rules = _rules(state, config)
    needed = [name for names, _ in rules.values() for name in names]
    problems = {
        "missing": [name for name in needed if name not in state],
        "left over": sorted(state.keys() - set(needed)),
    }
    if any(problems.values()):
        found = "; ".join(f"{problem} {', '.join(names)}" for problem, names in problems.items() if names)
        raise CheckpointError(f"{source} is not a released h8 or i8 model: {found}")
    converted = {}
    for name, (sources, make) in rules.items():
        try:
            converted[name] = make([state[part] for part in sources])
        except (RuntimeError, IndexError) as error:
            shapes = ", ".join(f"{part} {tuple(state[part].shape)}" for part in sources)
            raise CheckpointError(f"{source} has shapes that do not make a {name}: {shapes}") from error
    return restore(config, converted, source)


def channel_order(embed_dim: int) -> Tensor:
    """For each of our channels where the octic part of an h8 model ends, its index in the released order."""
    layout = Layout(embed_dim)
    return torch.arange(embed_dim).view(D8.order, -1)[list(layout.paper_order)].flatten()


def _tidy(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's own tensors, with DeiT's names for layer scale replaced by DINOv2's."""
    tidy = {}
    for name, tensor in state.items():
        name = strip_wrappers(name).removeprefix("backbone.")
        name = re.sub(r"^(blocks\.\d+)\.gamma_([12])$", r"\1.ls\2.gamma", name)
        name = re.sub(r"^(blocks\.\d+)\.gamma_([12])\.alpha_", r"\1.ls\2.alpha_", name)
        if not name.startswith(TRAINING_HEADS):
            tidy[name] = tensor
    return tidy


def _config(state: dict[str, Tensor], num_heads: int | None, source: str) -> dict[str, Any]:
    """What the shapes say about the model."""

    def shape(name: str, ndim: int) -> torch.Size:
        if name not in state or state[name].ndim != ndim:
            raise CheckpointError(f"{source} is not a released h8 or i8 model: it has no {ndim}-d {name}")
        if not state[name].numel():
            raise CheckpointError(
                f"{source} is not a released h8 or i8 model: its {name} of shape {tuple(state[name].shape)} is empty"
            )
        return state[name].shape

    copies, in_chans, half_patch, _ = shape("patch_embed.lift8.conv_A1.weight", 4)
    half_grid = shape("pos_embed.0", 3)[0]
    width, patch_size, grid = D8.order * copies, 2 * half_patch, 2 * half_grid
    blocks = {match[1] for name in state if (match := re.match(r"blocks\.(\d+)\.", name))}
    octic_depth = sum(f"blocks.{i}.norm1.scaling.beta" in state for i in range(len(blocks)))
    hidden, narrow = shape(f"blocks.0.mlp.fc1{'.lin_A1' if octic_depth else ''}.weight", 2)
    if num_heads is None and width not in HEADS:
        raise ValueError(f"the number of heads of a model of width {width} is not known; pass num_heads")
    config = {
        "img_size": grid * patch_size,
        "patch_size": patch_size,
        "in_chans": in_chans,
        "num_classes": shape("head.weight", 2)[0] if "head.weight" in state else 0,
        "embed_dim": width,
        "depth": len(blocks),
        "num_heads": HEADS[width] if num_heads is None else num_heads,
        "mlp_ratio": hidden / narrow,
        "init_values": LAYER_SCALE,
        "family": "h8",
        "octic_depth": octic_depth,
        "mask_token": "mask_token.0" in state,
        "released_norm": True,
    }
    if "invariant_proj.weight" not in state:
        return config
    features = shape("invariant_proj.weight", 2)[1]
    widths = {count * copies: name for count, name in INVARIANT_WIDTHS.items()}
    if features not in widths:
        known = " or ".join(f"{count} ({name})" for count, name in widths.items())
        raise CheckpointError(f"{source} has {features} invariant features, expected {known}")
    return {**config, "family": "i8", "invariant": widths[features]}


def _rules(state: dict[str, Tensor], config: dict[str, Any]) -> Rules:
    """Where every tensor of our model comes from."""
    width, octic_depth = config["embed_dim"], config["octic_depth"]
    rules: Rules = {
        "patch_embed.weight": ([f"patch_embed.lift8.conv_{name}.weight" for name in _LIFTS], torch.stack),
        "patch_embed.bias": (["patch_embed.lift8.conv_A1.bias"], torch.cat),
        "pos_embed.weight": ([f"pos_embed.{i}" for i in range(len(_LIFTS))], _positions),
    }
    for token in ("cls_token", "mask_token") if config["mask_token"] else ("cls_token",):
        parts = sorted(name for name in state if name.startswith(f"{token}.")) or [f"{token}.0"]
        rules[f"{token}.weight"] = (parts, partial(_token, token, width))
    for i in range(octic_depth):
        rules |= _octic_block(f"blocks.{i}")
    # The break is the identity on our packed channels, so what reads and writes them afterwards is reordered
    # instead; behind an invariant there is nothing to reorder.
    standard = {
        f"blocks.{i}.{name}": axis
        for i in range(octic_depth, config["depth"])
        for name, axis in _STANDARD_BLOCK.items()
    }
    standard |= _NORM | (_HEAD if config["num_classes"] else {})
    order = channel_order(width)
    if config["family"] == "i8":
        order = torch.arange(width)
        rules |= {
            f"invariant.proj.{name}": ([f"invariant_proj.{name}"], torch.cat) for name in ("weight", "bias")
        }
    for name, axis in standard.items():
        rules[name] = ([name], partial(_reorder, axis, order))
    return rules


def _octic_block(block: str) -> Rules:
    rules: Rules = {}
    for layer in _LINEARS:
        name = f"{block}.{layer}"
        rules[f"{name}.weight_1"] = ([f"{name}.lin_{irrep}.weight" for irrep in _ONE_DIM], torch.stack)
        rules[f"{name}.weight_2"] = ([f"{name}.lin_E.weight"], torch.stack)
        rules[f"{name}.bias"] = ([f"{name}.lin_A1.bias"], torch.cat)
    for i in (1, 2):
        norm, scale = f"{block}.norm{i}", f"{block}.ls{i}"
        rules[f"{norm}.weight"] = ([f"{norm}.scaling.alpha_{irrep}" for irrep in _IRREPS], torch.cat)
        rules[f"{norm}.bias"] = ([f"{norm}.scaling.beta"], torch.cat)
        rules[f"{scale}.gamma"] = ([f"{scale}.alpha_{irrep}" for irrep in _IRREPS], torch.cat)
    return rules


def _positions(quarters: list[Tensor]) -> Tensor:
    """Corners [6, C/8, N/2, N/2]; our unfolding multiplies them by √(d/|G|), the released one does not."""
    factors = [sqrt(irrep.dim / D8.order) for irrep in D8.irreps for _ in range(irrep.dim)]
    return torch.stack([q.permute(2, 0, 1) / f for q, f in zip(quarters, factors, strict=True)])


def _token(token: str, width: int, parts: list[Tensor]) -> Tensor:
    """The part on A1; released files also store the other irreps, which were never trained."""
    flat = torch.cat([part.flatten() for part in parts])
    copies = width // D8.order
    if flat.numel() != width or flat[copies:].any():
        raise CheckpointError(
            f"{token} must have {width} channels and be zero outside A1, the first {copies}"
        )
    return flat[:copies].unsqueeze(0)


def _reorder(axis: int | None, order: Tensor, tensors: list[Tensor]) -> Tensor:
    (tensor,) = tensors
    return tensor if axis is None else tensor.index_select(axis, order.to(tensor.device))
