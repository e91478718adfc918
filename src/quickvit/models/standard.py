"""Checkpoints of standard ViTs: weights with the name and the options that their model was created with.

As those of Quick ViTs they are untrusted: only known options of a sane size build a model, and only if it fits.
"""

from __future__ import annotations

from typing import Any, get_type_hints

import torch
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor

from quickvit.models.checkpoints import (
    LARGEST,
    PREPROCESSING,
    CheckpointError,
    check_preprocessing,
    check_written,
    declared_preprocessing,
    is_a,
    require_fit,
    restore,
    tuples,
)
from quickvit.models.declared import declare
from quickvit.models.quick_vit import QuickVisionTransformer
from quickvit.models.zoo import STANDARD, ViT, create_model

# The options of a ViT; only plain values of their types are taken from a file.
OPTIONS = get_type_hints(VisionTransformer.__init__)


def standard_config(model: VisionTransformer) -> dict[str, Any] | None:
    """What a checkpoint says about a ViT that `create_model` made; None where it cannot be told."""
    created: dict[str, Any] = getattr(model, "config", None) or {}
    options = {name: value for name, value in created.items() if name != STANDARD}
    if STANDARD not in created or not all(_fits(name, value) for name, value in options.items()):
        return None
    preprocessing = declared_preprocessing(model)
    return {**created, PREPROCESSING: preprocessing} if preprocessing else created


def require_writable(model: ViT) -> None:
    """Refuse a model that no checkpoint could describe, before it is trained."""
    if isinstance(model, QuickVisionTransformer):
        check_written(model.config, model.state_dict(), type(model))
    elif standard_config(model) is None:
        created = getattr(model, "config", {})
        wrong = {k: v for k, v in created.items() if k != STANDARD and not _fits(k, v)}
        raise ValueError(f"a checkpoint could not describe {created.get(STANDARD)} with {wrong or created}")


def restore_any(
    config: dict[str, Any] | None, state: dict[str, Tensor], source: str = "the checkpoint"
) -> ViT:
    """Build the model that a checkpoint describes, a Quick ViT or a standard one, and load its weights."""
    if config is None or STANDARD not in config:
        return restore(config, state, source)
    options = tuples(config)
    name = options.pop(STANDARD)
    preprocessing = check_preprocessing(options.pop(PREPROCESSING, {}), source, options.get("in_chans"))
    for option, value in options.items():
        if not _fits(option, value):
            raise CheckpointError(
                f"{source} has {option}={value!r} in its configuration, which makes no sense"
            )
    if options.get("depth", 0) > len(state):
        raise CheckpointError(
            f"{source} has fewer tensors than the {options['depth']} blocks that it promises"
        )
    try:
        with torch.device("meta"):
            model = create_model(str(name), **options)
    except (ValueError, RuntimeError, TypeError, LookupError, AssertionError, ArithmeticError) as error:
        raise CheckpointError(f"{source} describes a model that cannot be built: {error}") from error
    require_fit(model.state_dict(), state, strict=True, source=source)
    model.load_state_dict({key: tensor.clone() for key, tensor in state.items()}, assign=True)
    declare(model, **preprocessing)
    return model


def _fits(name: str, value: Any) -> bool:
    """Whether an option is known, and its value of its type and size."""
    numbers = [v for v in (value if isinstance(value, tuple) else (value,)) if isinstance(v, int | float)]
    sane = all(0 <= v < LARGEST for v in numbers)
    return name in OPTIONS and is_a(value, OPTIONS[name]) and sane
