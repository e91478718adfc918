"""Layers compute several steps in one, unless a hook watches one of the steps or something else is in its place."""

from __future__ import annotations

from torch import nn


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
    """Whether a hook of a module wants to see what goes in, what comes out, or its gradient."""
    forward = module._forward_pre_hooks or module._forward_hooks
    return bool(forward or module._backward_pre_hooks or module._backward_hooks)


def is_ours(module: nn.Module) -> bool:
    """Whether a module computes what a layer of this library does: no wrapper, no adapter, no override."""
    return "forward" not in module.__dict__ and type(module).forward.__module__.startswith("quickvit.layers.")


def takes_pending(block: nn.Module) -> bool:
    """Whether a block can take what the block before left to add, and leave its own to the next.

    One with hooks cannot: they look at tokens, or free the parameters that are still to be added (FSDP's).
    """
    inside = block._modules.get("_orig_mod") or block  # of torch.compile(block)
    return is_ours(inside) and not (is_watched(block) or is_watched(inside))
