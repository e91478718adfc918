"""Parameters and multiply-accumulates (MACs) of a model, part by part.

MACs are those of matrix products: linear maps, attention, patch embedding and head. Norms, softmax and
residual sums are not counted. Papers on vision transformers often call this number FLOPs; here a MAC is two.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from quickvit.data import input_size
from quickvit.models import FAMILIES, SIZES, create_baseline
from quickvit.models.zoo import PATCHES

BASELINE = "vit"
PARTS = ("lift", "octic_blocks", "invariant", "standard_blocks", "head")


@dataclass(frozen=True)
class Part:
    """Parameters and MACs of one part of a model."""

    name: str
    parameters: int
    macs: int

    @property
    def flops(self) -> int:
        """Floating point operations: a multiplication and an addition per MAC."""
        return 2 * self.macs


@dataclass(frozen=True)
class Cost:
    """Parameters of a model and MACs of one image, by part.

    lift: patch embedding, positions and learned tokens; octic_blocks and standard_blocks: the two kinds of
    blocks; invariant: the map between them; head: final norm and classifier.
    """

    parts: tuple[Part, ...]

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return sum(part.parameters for part in self.parts)

    @property
    def macs(self) -> int:
        """MACs of the whole model."""
        return sum(part.macs for part in self.parts)

    @property
    def flops(self) -> int:
        """FLOPs of the whole model."""
        return 2 * self.macs

    def repeated(self, times: dict[str, int]) -> Cost:
        """The cost with some parts several times."""
        return Cost(
            tuple(
                Part(p.name, p.parameters * times.get(p.name, 1), p.macs * times.get(p.name, 1))
                for p in self.parts
            )
        )


def count(model: nn.Module, img_size: int | tuple[int, int] | None = None) -> Cost:
    """The cost of a Quick ViT or of timm's ViT, for one image of its own size or of `img_size`.

    Nothing is computed: the model is traced on the meta device, where shapes are all there is.
    """
    channels, *size = input_size(model)
    if img_size is not None:
        size = [img_size, img_size] if isinstance(img_size, int) else list(img_size)
    octic_depth = getattr(model, "octic_depth", 0)
    parameters, macs = dict.fromkeys(PARTS, 0), dict.fromkeys(PARTS, 0)
    for name, parameter in model.named_parameters():
        parameters[_part(name, octic_depth)] += parameter.numel()

    state = {n: t.detach().to("meta") for n, t in (*model.named_parameters(), *model.named_buffers())}
    image = torch.empty(1, channels, *size, dtype=next(model.parameters()).dtype, device="meta")
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(model, state, (image,))
    total = 0
    for name, operators in counter.get_flop_counts().items():
        flops = sum(operators.values())
        if name == "Global":
            total = flops // 2
        elif top := re.fullmatch(r"\w+\.(blocks\.\d+|(?!blocks)\w+)", name):
            macs[_part(top[1], octic_depth)] += flops // 2
    if sum(macs.values()) != total:
        raise RuntimeError(f"the parts have {sum(macs.values())} MACs, the whole model {total}")
    return Cost(tuple(Part(name, parameters[name], macs[name]) for name in PARTS))


@dataclass(frozen=True)
class Variant:
    """A named model: a registered Quick ViT, or timm's ViT of the same size."""

    family: str
    size: str
    patch_size: int
    invariant: str | None = None

    @property
    def name(self) -> str:
        """The name of the model; that of a baseline is ours, since timm's sizes of the same name differ."""
        first = "baseline" if self.family == BASELINE else f"quickvit_{self.family}"
        return f"{first}_{self.size}_patch{self.patch_size}_224"

    def create(self, **overrides: Any) -> nn.Module:
        """Build the model."""
        if self.family == BASELINE:
            return create_baseline(self.size, self.patch_size, **overrides)
        if self.invariant is not None:
            overrides = {"invariant": self.invariant, **overrides}
        return timm.create_model(self.name, **overrides)

    def cost(self) -> Cost:
        """What `count` says of the model, sooner: blocks of a kind are equal, so one of each is counted."""
        depth = SIZES[self.size].depth
        with torch.device("meta"):
            if self.family == BASELINE:
                return count(self.create(depth=1)).repeated({"standard_blocks": depth})
            if FAMILIES[self.family].full_depth:
                return count(self.create(depth=1)).repeated({"octic_blocks": depth})
            half = depth // 2
            repeats = {"octic_blocks": half, "standard_blocks": depth - half}
            return count(self.create(depth=2, octic_depth=1)).repeated(repeats)


def variants(
    family: str | None = None, size: str | None = None, patch_size: int | None = None
) -> Iterator[Variant]:
    """All named models, or those of a family ("vit" for the baselines), size or patch size."""
    families = (BASELINE, *FAMILIES)
    chosen = {"family": (family, families), "size": (size, tuple(SIZES)), "patch size": (patch_size, PATCHES)}
    for word, (value, known) in chosen.items():
        if value is not None and value not in known:
            raise ValueError(f"unknown {word} {value!r}; expected one of {', '.join(map(str, known))}")
    for s in SIZES if size is None else (size,):
        for patch in PATCHES if patch_size is None else (patch_size,):
            for f in families if family is None else (family,):
                for invariant in _invariants(f):
                    yield Variant(f, s, patch, invariant)


def _invariants(family: str) -> tuple[str | None, ...]:
    """The invariants of the paper's tables."""
    if family == "i8":
        return "power_spectrum", "polynomial"
    return ("power_spectrum",) if family == "d8" else (None,)


def _part(name: str, octic_depth: int) -> str:
    """The part to which a module or parameter of this name belongs."""
    first, *rest = name.split(".")
    if first == "blocks":
        return "octic_blocks" if int(rest[0]) < octic_depth else "standard_blocks"
    if first == "invariant":
        return "invariant"
    return "head" if first in ("norm", "fc_norm", "attn_pool", "head") else "lift"
