"""Hooks that look into layers which would otherwise compute several steps in one."""

from __future__ import annotations

from torch import nn


def is_watched(*modules: nn.Module | None) -> bool:
    """Whether a hook of a module, or of a part of one, wants to see what goes in, what comes out, or its gradient."""
    # Every block asks in every forward pass: `children()` would take three times as long.
    for module in modules:
        if module is not None and (_has_hooks(module) or is_watched(*module._modules.values())):
            return True
    return False


def _has_hooks(module: nn.Module) -> bool:
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)
