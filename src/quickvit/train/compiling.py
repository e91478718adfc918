"""How modules are compiled: whole, or block by block."""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

Compile = Literal["none", "default", "reduce-overhead", "max-autotune", "blocks"]
# What our and timm's transformers do before their blocks, beside the modules that they have for it.
EMBEDDING = ("_embed_crops", "_embed", "_pos_embed")


def compile_module(module: nn.Module, mode: Compile, **options: Any) -> None:
    """Compile a module where it is, in one of torch.compile's modes.

    blocks: like reduce-overhead, but each block by itself, and all that is beside them. Blocks that are alike are
    compiled once, so 40 are no more to compile than a few; what is lost are fusions from a block to the next.
    """
    if mode == "blocks":
        blocks = blocks_of(module)
        # Blocks share their code, of which PyTorch compiles a few variants only; they may all be different.
        config: Any = torch.compiler.config
        config.recompile_limit = max(config.recompile_limit, 8 + 4 * len(blocks))
        for part in _parts(module) if blocks else [module]:
            part.compile(mode="reduce-overhead", **options)
        for holder in [part for part in module.modules() if blocks_of(part)]:
            for name in EMBEDDING:
                if hasattr(holder, name):
                    compiled = torch.compile(getattr(holder, name), mode="reduce-overhead", **options)
                    setattr(holder, name, compiled)
    elif mode != "none":
        module.compile(mode=None if mode == "default" else mode, **options)


def has_graphs(mode: Compile) -> bool:
    """Whether modules are run by CUDA graphs on a GPU, whose memory belongs to a step."""
    return mode in ("reduce-overhead", "max-autotune", "blocks")


def blocks_of(module: nn.Module) -> list[nn.Module]:
    """The blocks of all transformers in a module."""
    stacks = [stack for name, stack in module.named_modules() if name.rpartition(".")[2] == "blocks"]
    return [block for stack in stacks for block in stack.children()]


def _parts(module: nn.Module) -> list[nn.Module]:
    """The blocks of a module, and the largest of its parts without any, if they have parameters."""
    if not blocks_of(module):
        return [module] if any(True for _ in module.parameters()) else []
    rest = [child for name, child in module.named_children() if name != "blocks"]
    return [*getattr(module, "blocks", nn.ModuleList()), *(part for child in rest for part in _parts(child))]
