"""Layers compute several steps in one, unless a hook watches one of the steps or something else is in its place."""

from __future__ import annotations

from torch import nn
from torch.nn.modules import module as everywhere


def are_called(*modules: nn.Module | None) -> bool:
    """Whether modules must be called one by one: a hook watches one or a part of it, or one is not ours."""
    # Every block asks in every forward pass: `children()` would take three times as long.
    for module in modules:
        if module is None:
            continue
        if is_watched(module) or not is_ours(module):
            return True
        # The parts of a parametrization compute weights, whoever asks for them.
        if "parametrizations" not in module._modules and are_called(*module._modules.values()):
            return True
    return False


def is_watched(module: nn.Module) -> bool:
    """Whether a hook of a module, or of all, wants to see what goes in, what comes out, or its gradient."""
    if (
        everywhere._global_forward_hooks
        or everywhere._global_forward_pre_hooks
        or everywhere._global_backward_hooks
        or everywhere._global_backward_pre_hooks
    ):
        return True
    return has_hooks(module)


def has_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks of its own."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


def is_ours(module: nn.Module) -> bool:
    """Whether a module computes what a layer of this library does: no wrapper, no adapter, no override."""
    if "forward" in module.__dict__:
        return False
    # Code that was generated is in no module.
    return (type(module).forward.__module__ or "").startswith("quickvit.layers.")


def is_idle(module: nn.Module) -> bool:
    """Whether nobody would notice if a module were not called."""
    return type(module) is nn.Identity and "forward" not in module.__dict__ and not is_watched(module)
