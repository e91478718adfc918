"""Several views of each image, for self-supervision: the crops of DINOv2, and those of DinoBloom."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from quickvit.data.colors import GRAYSCALE, SOLARIZE, UNCHANGED, Unpainted, draw_blur, draw_jitter
from quickvit.data.loader import Loaded, StepLoader, stack
from quickvit.data.masking import BlockMasking
from quickvit.data.seeds import derived_seed
from quickvit.data.sources import Source
from quickvit.data.transforms import PixelTransform, random_resized_crop, to_bytes

# DINOv2's: brightness, contrast, saturation, hue.
JITTER = (0.4, 0.4, 0.2, 0.1)
GLOBAL_SCALE = (0.32, 1.0)
LOCAL_SCALE = (0.05, 0.32)


@dataclass(frozen=True)
class ViewTransform(PixelTransform):
    """A random crop of an image, moved and coloured; what happens to it has a probability each.

    scale: area of the crop, relative to the image's. mirror: left to right. flip: upside down. turn: by 90°.
    jitter: brightness, contrast, saturation and hue change. grayscale, blur, solarize: of values above 128.
    on_device: colours change in `normalize`, for a whole batch at once.
    """

    scale: tuple[float, float] = GLOBAL_SCALE
    mirror: float = 0.5
    flip: float = 0.0
    turn: float = 0.0
    jitter: float = 0.8
    grayscale: float = 0.2
    blur: float = 0.5
    solarize: float = 0.0
    on_device: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"scale must be two rising numbers above 0 and at most 1, got {self.scale}")
        for name in ("mirror", "flip", "turn", "jitter", "grayscale", "blur", "solarize"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")

    def pixels(self, image: Image.Image, seed: int) -> Tensor | Unpainted:
        """The view that the seed decides, as bytes."""
        random = Random(seed)
        image = random_resized_crop(image, self.size, random, self.scale, interpolation=self.interpolation)
        for probability, move in (
            (self.mirror, Image.Transpose.FLIP_LEFT_RIGHT),
            (self.flip, Image.Transpose.FLIP_TOP_BOTTOM),
            (self.turn, Image.Transpose.ROTATE_90),
        ):
            if random.random() < probability:
                image = image.transpose(move)
        changes = draw_jitter(random, *JITTER) if random.random() < self.jitter else [UNCHANGED] * len(JITTER)
        changes.append(GRAYSCALE if random.random() < self.grayscale else UNCHANGED)
        changes.append(draw_blur(random) if random.random() < self.blur else UNCHANGED)
        changes.append(SOLARIZE if random.random() < self.solarize else UNCHANGED)
        return to_bytes(image, changes, self.on_device)


@dataclass(frozen=True)
class MultiCrop:
    """Global and local views of an image, each drawn from a seed of its own.

    squeeze: the side of a square that images are squeezed into first, None to take them as they are.
    """

    global_views: tuple[ViewTransform, ...]
    local_views: tuple[ViewTransform, ...]
    squeeze: int | None = None

    def pixels(self, image: Image.Image, seed: int) -> tuple[Any, Any]:
        """The views as bytes, [global views, 3, H, W] and [local views, 3, h, w]."""
        if self.squeeze is not None:
            image = image.resize((self.squeeze, self.squeeze), Image.Resampling.LANCZOS)
        views = [
            view.pixels(image, derived_seed(seed, number))
            for number, view in enumerate((*self.global_views, *self.local_views))
        ]
        number = len(self.global_views)
        local = stack(views[number:]) if self.local_views else torch.empty(0, 3, 0, 0, dtype=torch.uint8)
        return stack(views[:number]), local

    def normalize(self, pixels: Tensor | Unpainted) -> Tensor:
        """Bytes [..., 3, H, W] in the colours that the model expects."""
        return self.global_views[0].normalize(pixels)


def dinov2_views(
    global_size: int = 224,
    local_size: int = 96,
    local_views: int = 8,
    *,
    global_scale: tuple[float, float] = GLOBAL_SCALE,
    local_scale: tuple[float, float] = LOCAL_SCALE,
    on_device: bool = False,
) -> MultiCrop:
    """DINOv2's views: two global ones, blurred always and seldom, the second solarised at times; and local ones.

    The probabilities are those that DINO, BYOL and DINOv2's configuration name. In DINOv2's released code they
    are those of leaving the blur out, so that its first view is never blurred and its second one nearly always.
    """
    first = ViewTransform(global_size, scale=global_scale, blur=1.0, on_device=on_device)
    second = replace(first, blur=0.1, solarize=0.2)
    local = replace(first, img_size=local_size, scale=local_scale, blur=0.5)
    return MultiCrop((first, second), (local,) * local_views)


def dinobloom_views(
    global_size: int = 224,
    local_size: int = 96,
    local_views: int = 0,
    *,
    global_scale: tuple[float, float] = GLOBAL_SCALE,
    local_scale: tuple[float, float] = LOCAL_SCALE,
    on_device: bool = False,
) -> MultiCrop:
    """DinoBloom's views of cells: in all eight poses, and with colours that keep their meaning.

    By default there are no local ones: the loss between global and local crops did harm there.
    """
    poses: dict[str, Any] = {"mirror": 0.5, "flip": 0.5, "turn": 0.5, "grayscale": 0.0}
    whole = ViewTransform(global_size, scale=global_scale, blur=0.1, on_device=on_device, **poses)
    local = replace(whole, img_size=local_size, scale=local_scale, blur=0.5)
    return MultiCrop((whole, whole), (local,) * local_views, squeeze=global_size)


# ---------------------------------------------------------------------- batches


class ViewBatch(NamedTuple):
    """Views of B samples, normalised, and what is hidden of the global ones.

    global_views [B, G, 3, H, W], local_views [B, L, 3, h, w], masks [B, G, patches] (True is hidden), indices [B].
    """

    global_views: Tensor
    local_views: Tensor
    masks: Tensor
    indices: Tensor


class ViewLoader(StepLoader):
    """Views of shuffled samples, and masks; `options` are those of `StepLoader`."""

    def __init__(
        self, source: Source, transform: MultiCrop, masking: BlockMasking, *, seed: int = 0, **options: Any
    ) -> None:
        super().__init__(source, transform, _Collate(masking, seed), seed=seed, **options)

    def batches(self, start: int, stop: int) -> Iterator[ViewBatch]:
        """The batches of the steps start … stop − 1 of the run.

        Ask for all at once: workers start anew each time.
        """
        return self.load(start, stop)


@dataclass(frozen=True)
class _Collate:
    """Makes a batch of views and draws its masks, in the workers."""

    masking: BlockMasking
    seed: int

    def __call__(self, samples: Sequence[Loaded], step: int, first: int) -> ViewBatch:
        global_views, local_views = zip(*(sample.images for sample in samples), strict=True)
        return ViewBatch(
            stack(global_views),
            stack(local_views),
            self.masking(derived_seed(self.seed, step, "masks"), first, len(samples)),
            torch.tensor([sample.number for sample in samples]),
        )
