"""Exponential moving averages of weights: an averaged model, or a teacher."""

from __future__ import annotations

import copy

import torch
from torch import nn

from quickvit.train.norms import local


def averaged_copy(module: nn.Module) -> nn.Module:
    """A copy that follows by `follow` and is never trained itself."""
    return copy.deepcopy(module).requires_grad_(False)


@torch.no_grad()
def follow(average: nn.Module, module: nn.Module, decay: float) -> None:
    """average ← decay · average + (1 − decay) · module, for all parameters; buffers are copied."""
    ours, theirs = list(average.parameters()), list(module.parameters())
    torch._foreach_lerp_([local(p) for p in ours], [local(p) for p in theirs], 1 - decay)
    for own, other in zip(average.buffers(), module.buffers(), strict=True):
        own.copy_(other)
    # Layers keep what they derive from a weight, and do not notice that its parts on the ranks were written to.
    average.train(average.training)
