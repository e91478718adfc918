"""Hooks that look into layers which would otherwise compute several steps in one."""

from __future__ import annotations

from torch import nn


def is_watched(*modules: nn.Module) -> bool:
    """Whether a hook of a module, or of a part of one, wants to see what goes in, what comes out, or its gradient."""
    return any(_has_hooks(module) or is_watched(*module.children()) for module in modules)


def _has_hooks(module: nn.Module) -> bool:
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)
