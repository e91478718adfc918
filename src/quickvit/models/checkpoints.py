"""Checkpoints: safetensors with the model's configuration inside.

Files are untrusted: nothing in one is ever run, and a model is built only once its tensors are known to fit.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO, Literal, Union, get_args, get_origin, get_type_hints

import torch
from huggingface_hub.constants import SAFETENSORS_SINGLE_FILE
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from quickvit.layers import OcticFoldedBlock
from quickvit.models.declared import (
    CROP_MODES,
    INTERPOLATIONS,
    LABELS,
    WRAPPERS,
    declare,
    declared,
    unwrapped,
)
from quickvit.models.quick_vit import QuickVisionTransformer

CONFIG_KEY = "quickvit"
SUFFIX = ".safetensors"
# How images are prepared for the model and how its classes are called, in timm's words; beside its arguments in the
# configuration.
PREPROCESSING = "preprocessing"
# Where training programs keep the weights in what they save.
_NESTS = ("teacher", "model", "state_dict")
# What torch.load(weights_only=True) was seen to raise on damaged and on foreign files.
_UNREADABLE = (
    pickle.UnpicklingError,
    RuntimeError,
    OSError,
    EOFError,
    LookupError,
    ValueError,
    TypeError,
    AttributeError,
    AssertionError,
    OverflowError,
    struct.error,
)
# What tensors of impossible shapes in a safetensors file raise.
_UNREADABLE_TENSORS = (RuntimeError, TypeError, ValueError, OverflowError)
_AT_LEAST_ONE = ("img_size", "patch_size", "in_chans", "embed_dim", "num_heads", "pos_grid")
LARGEST = 2**31
# Larger than any patch or grid in use; a file that has the tensors is judged by them.
_LARGEST_GRID = 64


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message says why."""


# ---------------------------------------------------------------------- writing


def save_checkpoint(model: nn.Module, path: str | Path, state: dict[str, Tensor] | None = None) -> None:
    """Write weights and configuration of a Quick ViT (compiled or wrapped or not) to a safetensors file.

    `state` replaces the model's own state dict, for weights that were averaged or gathered from shards. What
    the model's timm configuration says about the preparation of images is written too. What `load_checkpoint` would
    refuse is not written. The file appears whole or not at all.
    """
    require_suffix(path)
    model = _unwrap(model)
    if any(isinstance(module, OcticFoldedBlock) for module in model.modules()):
        raise CheckpointError(
            "cannot save a model with folded blocks, which are for inference; save the model that it was made of, "
            "and fold that after it was loaded"
        )
    state = stripped(model.state_dict() if state is None else state)
    preprocessing = declared_preprocessing(model)
    config = {**model.config, PREPROCESSING: preprocessing} if preprocessing else model.config
    check_written(config, state, type(model))
    if problems := _problems(_outline(type(model), model.config).state_dict(), state):
        raise CheckpointError(
            f"cannot save a model that its configuration no longer describes: {'; '.join(problems)}"
        )
    save_weights(state, path, config)


def save_weights(state: dict[str, Tensor], path: str | Path, config: dict[str, Any] | None = None) -> None:
    """Write the tensors of any model to a safetensors file, which appears whole or not at all."""
    require_suffix(path)
    metadata = {"format": "pt"} if config is None else {"format": "pt", CONFIG_KEY: json.dumps(config)}
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.touch()
    mode = temporary.stat().st_mode
    try:
        tensors = {name: tensor.detach().contiguous() for name, tensor in state.items()}
        try:
            save_file(tensors, str(temporary), metadata=metadata)
        except SafetensorError as error:
            # So does safetensors call a full disk.
            raise OSError(f"cannot write {path}: {error}") from error
        # Some versions of safetensors let only the owner read what they write.
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def require_suffix(path: str | Path) -> None:
    """Refuse to write where `read_checkpoint` would expect a pickle."""
    if Path(path).suffix != SUFFIX:
        raise ValueError(f"checkpoints are written to {SUFFIX} files, got {path}")


def check_written(
    config: dict[str, Any], state: dict[str, Tensor], model_class: type[QuickVisionTransformer]
) -> None:
    """The checks of a reader, on what it will find."""
    try:
        found = tuples(json.loads(json.dumps(config)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            f"cannot save a model whose configuration JSON does not hold: {error}"
        ) from error
    source = "cannot save the model: it"
    check_preprocessing(found.pop(PREPROCESSING, {}), source, found.get("in_chans"))
    _check_config(found, state, source, get_type_hints(model_class.__init__))


def _unwrap(model: nn.Module) -> QuickVisionTransformer:
    inner = unwrapped(model)
    if not isinstance(inner, QuickVisionTransformer):
        raise TypeError(f"expected a QuickVisionTransformer, got {type(model).__name__}")
    return inner


# ---------------------------------------------------------------------- reading


def load_checkpoint(path: str | Path, strict: bool = True, **overrides: Any) -> QuickVisionTransformer:
    """Build the model that a checkpoint describes and load its weights, in the precision they were saved in.

    As every new module the model is in training mode: call .eval() for inference. `overrides` replace values of its
    configuration, for example drop_path_rate; a new img_size keeps the positions and resizes them in the forward
    pass.
    """
    state, config = read_checkpoint(path)
    return restore(config, state, str(path), strict, **overrides)


def read_checkpoint(path: str | Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    """The tensors of a checkpoint and its configuration, if it has one. Never runs code from the file.

    Of the folder of a run, or of one that `save_pretrained` made, the model in it.
    """
    path, when = Path(path), ""
    if path.is_dir():
        path, when = path / SAFETENSORS_SINGLE_FILE, ", which a run writes when it ends"
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}{when}")
    return _read_safetensors(path) if path.suffix == SUFFIX else (_read_pickle(path), None)


def restore(
    config: dict[str, Any] | None,
    state: dict[str, Tensor],
    source: str = "the checkpoint",
    strict: bool = True,
    model_class: type[QuickVisionTransformer] = QuickVisionTransformer,
    **overrides: Any,
) -> QuickVisionTransformer:
    """Build a model from a configuration and a state dict, neither of them trusted; see `load_checkpoint`."""
    if config is None:
        raise CheckpointError(
            f"{source} has weights, but does not say of which model. Load them into a model by "
            "quickvit.models.checkpoints.load_weights(model, state), and write both by quickvit.save_checkpoint()"
        )
    state = stripped(state, source)
    config = tuples(config)
    preprocessing = check_preprocessing(config.pop(PREPROCESSING, {}), source, config.get("in_chans"))
    _check_config(config, state, source, get_type_hints(model_class.__init__))
    img_size = overrides.pop("img_size", None)
    wanted = overrides.get("num_classes", config.get("num_classes"))
    if strict and wanted != config.get("num_classes"):
        raise ValueError(
            f"{source} has a head of {config.get('num_classes')} classes; load it without num_classes={wanted}, and "
            f"call reset_classifier({wanted})"
        )
    config = {**config, **overrides}
    try:
        model = _outline(model_class, config)
    except (ValueError, RuntimeError, OverflowError, AssertionError) as error:
        raise CheckpointError(f"{source} describes a model that cannot be built: {error}") from error
    own = model.state_dict()
    require_fit(own, state, strict, source)
    if own.keys() - state.keys():
        loaded = (state[name].dtype for name in own if name in state and state[name].is_floating_point())
        dtype = next(loaded, torch.get_default_dtype())
        fresh = model_class(**config).state_dict()
        state = {
            **{name: new.to(dtype) if new.is_floating_point() else new for name, new in fresh.items()},
            **state,
        }
    # Copies, because safetensors maps the file into memory, and later writes to it would change the weights.
    model.load_state_dict({name: state[name].clone() for name in own}, assign=True)
    declare(model, input_size=(model.in_chans, *model.img_size), **preprocessing)
    if img_size is not None:
        model.set_input_size(img_size)
    return model


def load_weights(
    model: nn.Module, state: dict[str, Tensor], strict: bool = True, source: str = "the checkpoint"
) -> None:
    """Load a state dict into a model; a mismatch names the keys."""
    state = stripped(state, source)
    own = model.state_dict()
    require_fit(stripped(own), state, strict, source)
    fitting = {name: state[bare] for name in own if (bare := strip_wrappers(name)) in state}
    model.load_state_dict(fitting, strict=strict)


def strip_wrappers(name: str) -> str:
    """A parameter name without what torch.compile and DDP put into it, wherever that stands."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, *_UNREADABLE_TENSORS) as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error
    if CONFIG_KEY not in metadata:
        return tensors, None
    try:
        config = json.loads(metadata[CONFIG_KEY])
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} has a configuration that is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} has a configuration that is not a dictionary: {config!r}")
    return tensors, config


def _read_pickle(path: Path) -> dict[str, Tensor]:
    # DeiT saves its command line next to the weights. A Namespace only holds attributes and has no code that
    # unpickling could run, so allowing it does not weaken weights_only.
    with path.open("rb") as file, torch.serialization.safe_globals([argparse.Namespace]):
        content = _load_tensors(file, path)
    for key in _NESTS:
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, expected a dictionary of tensors")
    foreign = [
        str(name)
        for name, value in content.items()
        if not (isinstance(name, str) and isinstance(value, Tensor))
    ]
    if foreign:
        raise CheckpointError(f"{path} has entries that are not tensors: {_list(foreign)}")
    if not content:
        raise CheckpointError(f"{path} holds no tensors")
    # A small file can say that one number is there a million million times.
    inflated = [name for name, tensor in content.items() if tensor.nbytes > tensor.untyped_storage().nbytes()]
    if inflated:
        raise CheckpointError(f"{path} has tensors that are larger than what is stored: {_list(inflated)}")
    return dict(content)


def _load_tensors(file: BinaryIO, path: Path) -> Any:
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        raise CheckpointError(
            f"{path} is damaged or holds more than tensors, and no code of a checkpoint is ever run: "
            f"{_reason(error)}"
        ) from error


def _reason(error: BaseException) -> str:
    """What is wrong with the file, without PyTorch's advice to trust it."""
    if isinstance(error, pickle.UnpicklingError) and error.__context__ is not None:
        error = error.__context__
    return str(error).partition("\n")[0].partition(" Please ")[0] or type(error).__name__


# ---------------------------------------------------------------------- do the tensors fit?


def _outline(model_class: type[QuickVisionTransformer], config: dict[str, Any]) -> QuickVisionTransformer:
    """The model without memory for its weights."""
    with torch.device("meta"):
        return model_class(**config)


def stripped(state: dict[str, Tensor], source: str = "the model") -> dict[str, Tensor]:
    """A state dict without the prefixes that DDP and torch.compile put before names.

    Nor has it the entries that count the updates of an average, or have nothing in them.
    """
    state = {name: tensor for name, tensor in state.items() if name != "n_averaged" and tensor.numel()}
    stripped = {strip_wrappers(name): tensor for name, tensor in state.items()}
    if len(stripped) != len(state):
        raise CheckpointError(f"{source} has several tensors whose names differ by a wrapper's prefix only")
    return stripped


def require_fit(own: dict[str, Tensor], state: dict[str, Tensor], strict: bool, source: str) -> None:
    """Refuse tensors that are not a model's; without `strict`, only those that both have are compared."""
    if not strict:
        common = own.keys() & state.keys()
        own, state = ({name: tensors[name] for name in common} for tensors in (own, state))
    if problems := _problems(own, state):
        raise CheckpointError(f"{source} does not fit the model: {'; '.join(problems)}")


def _problems(own: dict[str, Tensor], state: dict[str, Tensor]) -> list[str]:
    """Why a state dict does not fit a model with these tensors of its own."""
    pairs = [(name, tensor, own[name]) for name, tensor in state.items() if name in own]
    found = {
        "missing": [name for name in own if name not in state],
        "unexpected": [name for name in state if name not in own],
        "of another shape": [
            f"{name} {tuple(theirs.shape)} for {tuple(ours.shape)}"
            for name, theirs, ours in pairs
            if theirs.shape != ours.shape
        ],
        "of another type": [
            f"{name} {theirs.dtype} for {ours.dtype}"
            for name, theirs, ours in pairs
            if theirs.is_floating_point() != ours.is_floating_point()
        ],
    }
    return [f"{problem} {_list(names)}" for problem, names in found.items() if names]


def _short(value: Any, most: int = 200) -> str:
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}…"


def _list(names: list[str], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


# ---------------------------------------------------------------------- is the configuration sane?


def _check_config(
    config: dict[str, Any], state: dict[str, Tensor], source: str, known: dict[str, Any]
) -> None:
    """Refuse unknown names, wrong types, and sizes that the tensors of the file rule out."""
    if unknown := [name for name in config if name not in known or name == "return"]:
        raise CheckpointError(
            f"{source} has a configuration that this version does not know: {_list(unknown)}"
        )
    for name, value in config.items():
        if not is_a(value, known[name]):
            raise CheckpointError(
                f"{source} has {name}={value!r} in its configuration, expected {_words(known[name])}"
            )
        least = int(name in _AT_LEAST_ONE)
        numbers = [v for v in _flat(value) if isinstance(v, int | float)]
        if not all(least <= v < LARGEST for v in numbers):
            raise CheckpointError(
                f"{source} has {name}={value!r} in its configuration, expected {least} or more, within reason"
            )
    # These take long to build even without memory for the weights; the outline shows whether the others fit.
    patch_size, img_size = (max(_flat(config.get(name, 1))) for name in ("patch_size", "img_size"))
    grid = config.get("pos_grid") or img_size // patch_size
    limits = {"depth": (config.get("depth", 0), len(state))}
    for name, size in (("patch_embed.weight", patch_size), ("pos_embed.weight", grid)):
        # A corner has half of the side, rounded up.
        limits[name] = size, 2 * max(state[name].shape[-1:], default=0) if name in state else _LARGEST_GRID
    for name, (size, most) in limits.items():
        if size > most:
            raise CheckpointError(
                f"{source} has a configuration of another model: {name} of size {size}, its tensors allow "
                f"{most}"
            )


def declared_preprocessing(model: nn.Module) -> dict[str, Any]:
    """What a model's timm configuration says about its images and answers."""
    found = declared(model)
    return {name: found[name] for name in _IMAGES if found.get(name) is not None}


def check_preprocessing(found: Any, source: str, in_chans: Any = None) -> dict[str, Any]:
    """What a file says about its images, refused unless each entry is what timm expects there."""
    found = tuples(found) if isinstance(found, dict) else {"preprocessing": found}
    # timm declares three colours also for models of other channels.
    lengths = (1, 3, in_chans)
    for name, value in found.items():
        sane = name in _IMAGES and _IMAGES[name](value)
        if not sane or (name in ("mean", "std") and len(value) not in lengths):
            raise CheckpointError(f"{source} has {name}={_short(value)} for the preparation of images")
    return found


def _are_colors(value: Any) -> bool:
    return (
        isinstance(value, tuple)
        and bool(value)
        and all(type(v) in (int, float) and abs(v) < LARGEST for v in value)
    )


# What is kept of a model's timm configuration, and what it must be.
_IMAGES: dict[str, Callable[[Any], bool]] = {
    "mean": _are_colors,
    "std": lambda value: _are_colors(value) and min(value) > 0,
    "interpolation": lambda value: value in INTERPOLATIONS,
    "crop_pct": lambda value: type(value) in (int, float) and 0 < value <= 1,
    "crop_mode": lambda value: value in CROP_MODES,
    LABELS: lambda value: isinstance(value, tuple) and all(isinstance(name, str) for name in value),
}


def tuples(config: dict[str, Any]) -> dict[str, Any]:
    """A copy with tuples for JSON's lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}


def is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of an annotated type; a bool is no number here, and an int will do for a float."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(is_a(value, option) for option in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return isinstance(value, tuple) and len(value) == len(arguments) and all(map(is_a, value, arguments))
    return type(value) is hint or (hint is float and type(value) is int)


def _words(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint).replace("typing.", "")


def _flat(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
