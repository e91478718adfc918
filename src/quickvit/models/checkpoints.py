"""Checkpoints: safetensors with the model's configuration inside."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quickvit.models.quick_vit import QuickVisionTransformer

CONFIG_KEY = "quickvit"
# Prefixes that wrappers put before parameter names: torch.compile, DDP.
_WRAPPERS = ("_orig_mod.", "module.")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


def save_checkpoint(model: nn.Module, path: str | Path) -> None:
    """Write weights and configuration of a Quick ViT (compiled or wrapped or not) to a safetensors file."""
    state = {strip_wrappers(name): t.detach().contiguous() for name, t in model.state_dict().items()}
    while not isinstance(model, QuickVisionTransformer):
        inner = getattr(model, "_orig_mod", None) or getattr(model, "module", None)
        if inner is None:
            raise TypeError(f"expected a QuickVisionTransformer, got {type(model).__name__}")
        model = inner
    save_file(state, str(path), metadata={CONFIG_KEY: json.dumps(model.config)})


def load_checkpoint(path: str | Path, strict: bool = True, **overrides: Any) -> QuickVisionTransformer:
    """Build the model that a checkpoint describes and load its weights.

    `overrides` replace values of its configuration, for example drop_path_rate; a new img_size keeps the positions
    and resizes them in the forward pass.
    """
    state, config = read_checkpoint(path)
    if config is None:
        raise CheckpointError(
            f"{path} has no quickvit configuration; create a model and use load_weights() instead"
        )
    img_size = overrides.pop("img_size", None)
    try:
        model = QuickVisionTransformer(**{**config, **overrides})
    except TypeError as error:
        raise CheckpointError(
            f"{path} has a configuration that this version does not know: {error}"
        ) from error
    load_weights(model, state, strict=strict, source=str(path))
    if img_size is not None:
        model.set_input_size(img_size)
    return model


def read_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The tensors of a checkpoint and its configuration, if it has one. Never runs code from the file."""
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}")
    if path.suffix == ".safetensors":
        try:
            with safe_open(str(path), framework="pt") as file:
                metadata = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
        return tensors, _config(metadata.get(CONFIG_KEY), path)
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{path} cannot be read as tensors alone (weights_only=True): {str(error).splitlines()[0]}"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a dictionary of tensors")
    for key in ("teacher", "model", "state_dict"):
        if isinstance(content.get(key), dict):
            content = content[key]
    foreign = [name for name, value in content.items() if not isinstance(value, Tensor)]
    if foreign:
        raise CheckpointError(f"{path} has entries that are not tensors: {_names(foreign)}")
    return content, None


def load_weights(
    model: nn.Module, state: dict[str, Tensor], strict: bool = True, source: str = "the checkpoint"
) -> None:
    """Load a state dict into a model; a mismatch names the keys."""
    state = {strip_wrappers(name): tensor for name, tensor in state.items()}
    own = {strip_wrappers(name): name for name in model.state_dict()}
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    problems = []
    if missing := [name for name in own if name not in state]:
        problems.append(f"missing {_names(missing)}")
    if unexpected := [name for name in state if name not in own]:
        problems.append(f"unexpected {_names(unexpected)}")
    differing = [name for name in state if name in own and state[name].shape != shapes[own[name]]]
    if differing:
        described = [f"{n} {tuple(state[n].shape)} for {tuple(shapes[own[n]])}" for n in differing]
        problems.append(f"of another shape {_names(described)}")
    if problems and (strict or differing):
        raise CheckpointError(f"{source} does not fit the model: {'; '.join(problems)}")
    model.load_state_dict({own[name]: tensor for name, tensor in state.items() if name in own}, strict=strict)


def strip_wrappers(name: str) -> str:
    """A parameter name without the prefixes of torch.compile and DDP, wherever they stand."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _config(text: str | None, path: Path) -> dict[str, Any] | None:
    if text is None:
        return None
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} has a configuration that is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} has a configuration that is not a dictionary: {config!r}")
    return {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}


def _names(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
