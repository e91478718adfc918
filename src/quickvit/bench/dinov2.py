"""A step of DINOv2's training as the recipe takes it: all crops in one packed pass, and in one pass per size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from quickvit.bench import work
from quickvit.bench.flops import BASELINE, Variant
from quickvit.bench.models import autocast, competitors, model_work, random_images
from quickvit.bench.table import Row, timed_rows
from quickvit.bench.timing import Case, Job, Settings, measure
from quickvit.bench.work import Ceilings, Shape, Storage, Work
from quickvit.data import BlockMasking, ViewBatch
from quickvit.recipes import Dinov2, Dinov2Config
from quickvit.recipes.dino.backbone import CropEncoder
from quickvit.recipes.dino.head import DinoHead
from quickvit.recipes.dino.targets import Targets
from quickvit.recipes.dinov2 import GROUP, IMAGENET, SUBSET, resolve
from quickvit.train.distributed import trained

# DINOv2's crops of an image: how many, and their side as a share of the largest.
CROPS = ((2, 1.0), (8, 96 / 224))
HEADS = "heads and losses"


class Separate(CropEncoder):
    """A backbone that takes crops in one pass per size."""

    def forward(self, crops: Sequence[Tensor], mask: Tensor | None = None) -> list[Tensor]:
        """As the packed pass."""
        masks = [mask, *[None] * (len(crops) - 1)]
        return [super(Separate, self).forward([x], hidden)[0] for x, hidden in zip(crops, masks, strict=True)]


class Remembered(CropEncoder):
    """A backbone without work: after the first time it answers the same tokens."""

    tokens: list[Tensor] | None = None

    def forward(self, crops: Sequence[Tensor], mask: Tensor | None = None) -> list[Tensor]:
        """As the packed pass; gradients end here."""
        if self.tokens is None:
            with torch.no_grad():
                self.tokens = super().forward(crops, mask)
        return [x.detach().requires_grad_(torch.is_grad_enabled()) for x in self.tokens]


def bench_dinov2(
    settings: Settings,
    ceilings: Ceilings,
    shapes: Sequence[Shape],
    families: Sequence[str],
    *,
    drop_path: float = IMAGENET["drop_path"],
    drop_path_subset: bool | None = None,
    separate: bool = True,
) -> list[Row]:
    """Steps of DINOv2 less the optimiser: two crops through the teacher, ten through the student, heads and losses.

    Each backbone is timed with all crops in one packed pass, as it is trained, and unless `separate` is False with a
    pass per size; and once for all, what the heads and losses take of these times.
    """
    subset = drop_path > SUBSET if drop_path_subset is None else drop_path_subset
    rows = []
    for shape in shapes:
        build = partial(dinov2_step, shape, settings, drop_path=drop_path, drop_path_subset=subset)
        head_work = _head_work(shape, settings)
        packed, apart = [], []
        for name in competitors(families):
            steps = [*_work(shape, name, settings, drop_path if subset else 0.0), *head_work]
            packed.append(Case(name, partial(build, name, CropEncoder), steps, settings.batch))
            if separate:
                several = partial(build, name, Separate)
                apart.append(Case(f"{name}, a pass per size", several, steps, settings.batch))
        without = partial(dinov2_step, replace(shape, depth=1), settings, BASELINE, Remembered)
        heads = Case(HEADS, without, head_work, settings.batch)
        label = f"{shape.label} dinov2"
        outcomes = measure([*packed, *apart, heads], settings, label)
        rows += timed_rows(f"{label} step", packed, outcomes, settings, ceilings)
        for case, one in zip(apart, packed, strict=False):
            rows += timed_rows(f"{label} packing of {one.name}", [case, one], outcomes, settings, ceilings)
        rows += timed_rows(f"{label} {HEADS}", [heads], outcomes, settings, ceilings)
    return rows


def dinov2_crops(shape: Shape) -> list[tuple[int, Shape]]:
    """The crops, their sides rounded to whole patches (98 pixels for patches of 14)."""
    crops = []
    for copies, share in CROPS:
        side = max(1, round(shape.img_size * share / shape.patch)) * shape.patch
        crops.append((copies, replace(shape, img_size=side)))
    return crops


def dinov2_step(
    shape: Shape,
    settings: Settings,
    name: str,
    encoder: type[CropEncoder] = CropEncoder,
    *,
    drop_path: float = IMAGENET["drop_path"],
    drop_path_subset: bool = True,
) -> Job:
    """A step of a family or of the baseline, its modules compiled as the settings say."""
    config = Dinov2Config(
        Variant(name, shape.size, shape.patch).name,
        data="",
        out=Path(),
        img_size=shape.img_size,
        batch_size=settings.batch,
        model_args={"depth": shape.blocks},
        precision="bf16" if settings.dtype == torch.bfloat16 else "float32",
        drop_path=drop_path,
        drop_path_subset=drop_path_subset,
    )
    with torch.device(settings.device):
        recipe = Dinov2(resolve(config, settings.device))
    for module in recipe.modules.values():
        module.train(trained(module))
        if isinstance(module, CropEncoder):
            module.__class__ = encoder
        if isinstance(module, CropEncoder | DinoHead | Targets) and not isinstance(module, Remembered):
            settings.compiled(module)
    batch = _batch(recipe, shape, settings)

    def step() -> None:
        settings.begin_step()
        with autocast(settings):
            loss, _ = recipe.loss(batch, 0)
        loss.backward()
        for module in recipe.modules.values():
            module.zero_grad(set_to_none=True)

    return step


def _batch(recipe: Dinov2, shape: Shape, settings: Settings) -> ViewBatch:
    """Noise in the shapes of a batch, and masks."""
    batch, masks = settings.batch, recipe.masking(0, 0, settings.batch).to(settings.device)
    large, small = (
        random_images(number * batch, crop, settings).unflatten(0, (batch, number))
        for number, crop in dinov2_crops(shape)
    )
    return ViewBatch(large, small, masks, torch.arange(batch))


# ---------------------------------------------------------------------- work


def _work(shape: Shape, name: str, settings: Settings, dropped: float) -> list[Work]:
    """The steps of teacher and student; a share of the student's samples may be left out of its branches."""
    storage = Storage.training(settings.dtype)
    if settings.dtype == torch.bfloat16 and IMAGENET["residual"] == "bf16":
        storage = replace(storage, stream=storage.compute)
    crops = [(copies * settings.batch, crop) for copies, crop in dinov2_crops(shape)]
    steps = model_work(crops[0][1], name, crops[0][0], storage, features=True)
    for number, crop in crops:
        kept = number - int(number * dropped)
        steps += model_work(crop, name, kept, storage, backward=True, features=True)
    return steps


def _head_work(shape: Shape, settings: Settings) -> list[Work]:
    """The products of both heads, those of the student also backwards, on class tokens and hidden patches."""
    storage, side = Storage.training(settings.dtype), shape.img_size // shape.patch
    (views, _), (local, _) = CROPS
    group = math.gcd(GROUP, settings.batch)
    hidden = settings.batch // group * BlockMasking((side, side), group=group).most
    taught = settings.batch * views + hidden
    with torch.device("meta"):
        head = DinoHead(shape.dims.embed_dim, IMAGENET["prototypes"])
    steps = []
    for rows, passes in ((taught, 1), (taught + settings.batch * local, 3)):
        for weight in head.parameters():
            if weight.ndim == 2:
                steps += passes * [work.linear(rows, weight.shape[1], weight.shape[0], storage)]
    return steps
