"""Whether a model keeps what its family promises: equivariance before the break, invariance at the end."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from quickvit.data import input_size
from quickvit.group import D8, Element, act_on_image, act_on_tokens
from quickvit.models import FAMILIES, QuickVisionTransformer
from quickvit.models.declared import unwrapped
from quickvit.testing import TOLERANCES, errors_and_tolerance, unmoved


@dataclass(frozen=True)
class ElementErrors:
    """Errors under one element, relative to the spread over images; None where the notion does not apply."""

    element: str
    equivariance: float | None
    invariance: float


@dataclass(frozen=True)
class SymmetryReport:
    """Errors for each element of D8, and what was promised of them.

    equivariance: of the steerable tokens after the last octic block, under the model's own group.
    invariance: of the logits, or of the pooled features of a model without a head.
    tolerance: what rounding alone may cost each promise.
    """

    errors: tuple[ElementErrors, ...]
    tolerance: dict[str, float]

    @property
    def promises(self) -> tuple[str, ...]:
        """What was promised."""
        return tuple(self.tolerance)

    @property
    def worst(self) -> dict[str, float | None]:
        """The largest error of each kind."""
        equivariance = [e.equivariance for e in self.errors if e.equivariance is not None]
        return {
            "equivariance": max(equivariance, default=None),
            "invariance": max(e.invariance for e in self.errors),
        }

    @property
    def broken(self) -> tuple[str, ...]:
        """The promises that are not kept."""
        worst = self.worst
        return tuple(
            p for p in self.promises if (error := worst[p]) is not None and not error <= self.tolerance[p]
        )


def verify_symmetry(
    model: nn.Module, dtype: torch.dtype = torch.float32, seed: int = 0, batch_size: int = 4
) -> SymmetryReport:
    """Measure a model in evaluation mode on random images of its own size, in `dtype`; it is left as it was.

    A rotation turns H × W images into W × H ones: a model for images that are not square must take both.
    """
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, TOLERANCES))}, got {dtype}")
    model = copy.deepcopy(unwrapped(model)).to(dtype).eval()
    device = next(model.parameters()).device
    images = random_images((batch_size, *input_size(model)), seed).to(device, dtype)

    def output(x: Tensor) -> Tensor:
        y: Tensor = model(x)
        return y.mean(1) if y.ndim == 3 else y

    equivariance: dict[Element, float] = {}
    tolerance: dict[str, float] = {}
    with torch.no_grad():
        invariance, rounding = errors_and_tolerance(output, images, act_on_image, unmoved)
        if isinstance(model, QuickVisionTransformer):
            equivariance, steerable_rounding = _steerable_errors(model, images)
            if model.config["lift"] == "octic":
                tolerance["equivariance"] = steerable_rounding
            if FAMILIES[model.family].invariant:
                tolerance["invariance"] = rounding
    errors = tuple(ElementErrors(str(g), equivariance.get(g), invariance[g]) for g in D8.elements)
    return SymmetryReport(errors, tolerance)


def random_images(shape: tuple[int, int, int, int], seed: int = 0) -> Tensor:
    """Smooth random images [B, in, H, W] with noise; unlike noise alone, they differ after averaging."""
    generator = torch.Generator("cpu").manual_seed(seed)
    smooth = torch.randn(*shape[:2], 4, 4, generator=generator)
    smooth = functional.interpolate(smooth, shape[2:], mode="bicubic", align_corners=False)
    return smooth + torch.randn(shape, generator=generator) / 2


def _steerable_errors(model: QuickVisionTransformer, images: Tensor) -> tuple[dict[Element, float], float]:
    group = model.group
    grid = images.shape[2] // model.patch_size, images.shape[3] // model.patch_size
    prefix = model.num_prefix_tokens
    return errors_and_tolerance(
        lambda x: model.forward_steerable(x).tokens,
        images,
        lambda x, g: act_on_image(x, g, group),
        lambda y, g: act_on_tokens(y, g, grid, group, prefix=prefix),
        group,
    )
