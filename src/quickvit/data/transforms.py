"""From an image to the tensor that a model sees; every random choice comes from a seed that is passed in."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from random import Random
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import torch
from PIL import Image
from timm.data.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.data.transforms_factory import create_transform
from torch import Tensor

from quickvit.data.colors import (
    GRAYSCALE,
    SOLARIZE,
    Change,
    Unpainted,
    color,
    draw_blur,
    draw_jitter,
    paint_batch,
    paint_image,
)
from quickvit.data.crops import FILTERS, Crop, Drawn, Uncropped, crop_batch, crop_image, draw_box
from quickvit.models.declared import CROP_MODES, INTERPOLATIONS

Color = tuple[float, float, float]
Transform = Callable[[Image.Image, int], Tensor]
"""An image and a seed → what a model sees of it."""
Where = Literal["workers", "device"]
"""Who augments: the loader's processes one image after the other, or the device a whole batch at once."""
# An image is resized as a whole unless it is so many times longer than the part that is kept of it.
LONGEST = 16


@runtime_checkable
class TwoSteps(Protocol):
    """A transform whose workers hand over bytes, which are normalised on the device; of one view or of several."""

    def pixels(self, image: Image.Image, seed: int) -> Any:
        """An image as bytes."""
        ...

    def normalize(self, pixels: Any) -> Any:
        """A batch of them as the model sees it."""
        ...


AnyTransform = Transform | TwoSteps


@dataclass(frozen=True)
class PixelTransform(ABC):
    """A transform in two steps, so that workers hand over bytes and a whole batch is normalised at once."""

    img_size: int | tuple[int, int]
    _: KW_ONLY
    interpolation: str = "bicubic"
    mean: Color = IMAGENET_DEFAULT_MEAN
    std: Color = IMAGENET_DEFAULT_STD

    def __post_init__(self) -> None:
        if min(self.size) < 1:
            raise ValueError(f"img_size must be at least 1, got {self.img_size}")
        if self.interpolation not in INTERPOLATIONS:
            known = ", ".join(INTERPOLATIONS)
            raise ValueError(f"unknown interpolation {self.interpolation!r}; expected one of {known}")
        if min(self.std) <= 0:
            raise ValueError(f"std must be above 0, got {self.std}")

    @abstractmethod
    def pixels(self, image: Image.Image, seed: int) -> Tensor | Unpainted | Uncropped:
        """An image as bytes [3, H, W], or what is yet to be made into that."""

    def normalize(self, pixels: Tensor | Unpainted | Uncropped) -> Tensor:
        """Bytes [..., 3, H, W] → (x / 255 − mean) / std in float32, on the device that they are on."""
        if isinstance(pixels, Uncropped):
            crops, changes = pixels.drawn
            values = paint_batch(crop_batch(pixels.pixels, crops, self.size, self.interpolation), changes)
        else:
            values = paint_batch(*pixels) if isinstance(pixels, Unpainted) else pixels.float()
        mean, std = (color(tuple(each), values.device) for each in (self.mean, self.std))
        return values.div_(255).sub_(mean).div_(std)

    def __call__(self, image: Image.Image, seed: int = 0) -> Tensor:
        """An image as the model sees it, float32 [3, H, W]."""
        return self.normalize(self.pixels(image, seed))

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return (self.img_size, self.img_size) if isinstance(self.img_size, int) else self.img_size


# ---------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class EvalTransform(PixelTransform):
    """timm's evaluation: the shorter side resized to img_size / crop_ratio, then the centre.

    crop_mode: timm's "center"; or "squash" both sides, or add a "border" to the shorter one.
    """

    crop_ratio: float = 1.0
    crop_mode: str = "center"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.crop_ratio <= 1:
            raise ValueError(f"crop_ratio must be above 0 and at most 1, got {self.crop_ratio}")
        if self.crop_mode not in CROP_MODES:
            raise ValueError(f"unknown crop_mode {self.crop_mode!r}; expected one of {', '.join(CROP_MODES)}")

    @cached_property
    def _transform(self) -> Callable[[Image.Image], Tensor]:
        transform: Callable[[Image.Image], Tensor] = create_transform(
            (3, *self.size),
            interpolation=self.interpolation,
            mean=self.mean,
            crop_pct=self.crop_ratio,
            crop_mode=self.crop_mode,
            normalize=False,
        )
        return transform

    def pixels(self, image: Image.Image, seed: int = 0) -> Tensor:  # noqa: ARG002
        """The same bytes whatever the seed."""
        if self.crop_mode == "center":
            image = _without_ends(image, self.size)
        elif self.crop_mode == "border":
            image = _thick_enough(image, [math.floor(side / self.crop_ratio) for side in self.size])
        return self._transform(image)


def eval_transform(
    img_size: int | tuple[int, int] = 224,
    crop_ratio: float = 1.0,
    interpolation: str = "bicubic",
    mean: Color = IMAGENET_DEFAULT_MEAN,
    std: Color = IMAGENET_DEFAULT_STD,
) -> EvalTransform:
    """The evaluation transform; DeiT III evaluates with the whole height or width (crop ratio 1)."""
    return EvalTransform(img_size, interpolation=interpolation, mean=mean, std=std, crop_ratio=crop_ratio)


# ---------------------------------------------------------------------- augmentation


@dataclass(frozen=True)
class RandomTransform(PixelTransform):
    """A part of an image, moved and in other colours, as a seed decides.

    colors, crops: where they are carried out. A device that crops changes colours too, since those come last.
    """

    _: KW_ONLY
    colors: Where = "workers"
    crops: Where = "workers"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("colors", "crops"):
            if getattr(self, name) not in get_args(Where):
                raise ValueError(f"{name} must be workers or device, got {getattr(self, name)!r}")
        if self.crops == "device" and self.interpolation not in FILTERS:
            raise ValueError(
                f"a device crops by {' or '.join(FILTERS)} interpolation, got {self.interpolation!r}; "
                "leave crops to the workers"
            )

    @abstractmethod
    def draw(self, height: int, width: int, seed: int) -> tuple[Crop, list[Change]]:
        """What becomes of an image of this size."""

    @property
    def takes_bytes(self) -> bool:
        """Whether `pixels` wants nothing of an image but its bytes [H, W, 3], and takes them in its place."""
        return self.crops == "device"

    def pixels(self, image: Image.Image | Tensor, seed: int) -> Tensor | Unpainted | Uncropped:
        """What the seed decides, as bytes, or what is yet to be made into that."""
        if self.takes_bytes:
            pixels = to_tensor(image)
            height, width, _ = pixels.shape
            return Uncropped(pixels, Drawn.record(*self.draw(height, width, seed)))
        assert isinstance(image, Image.Image)
        crop, changes = self.draw(image.height, image.width, seed)
        image = crop_image(image, crop, self.size, self.interpolation)
        if self.colors == "device":
            return Unpainted(to_tensor(image).permute(2, 0, 1), torch.tensor(changes).view(-1, 2))
        return to_tensor(paint_image(image, changes)).permute(2, 0, 1)


# ---------------------------------------------------------------------- DeiT III


@dataclass(frozen=True)
class DeiT3Transform(RandomTransform):
    """DeiT III's augmentation: random resized crop, flip, ThreeAugment, colour jitter.

    scale, ratio: area and aspect of the crop, relative to the image's area and absolute.
    flip: probability of a mirroring left to right.
    three_augment: one of grayscale, solarisation and Gaussian blur for every image, with equal odds.
    color_jitter: brightness, contrast and saturation, in random order, each by a factor from 1 ± so much.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    three_augment: bool = True
    color_jitter: float = 0.3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if not 0 < low <= high:
                raise ValueError(f"{name} must be two rising numbers above 0, got {(low, high)}")
        if self.scale[1] > 1:
            raise ValueError(f"scale must be at most 1, got {self.scale[1]}")
        if not 0 <= self.flip <= 1:
            raise ValueError(f"flip must be from 0 to 1, got {self.flip}")
        if self.color_jitter < 0:
            raise ValueError(f"color_jitter must be at least 0, got {self.color_jitter}")

    def draw(self, height: int, width: int, seed: int) -> tuple[Crop, list[Change]]:
        """The crop, whether it is mirrored, and its colours."""
        random = Random(seed)
        crop = Crop(*draw_box(height, width, random, self.scale, self.ratio), random.random() < self.flip)
        changes = [draw_three_augment(random)] if self.three_augment else []
        if self.color_jitter:
            changes += draw_jitter(random, *(self.color_jitter,) * 3)
        return crop, changes


def deit3_transform(img_size: int | tuple[int, int] = 224, **options: Any) -> DeiT3Transform:
    """DeiT III's augmentation for images of this size; see `DeiT3Transform` for the options."""
    return DeiT3Transform(img_size, **options)


# ---------------------------------------------------------------------- parts


def draw_three_augment(random: Random) -> Change:
    """One of grayscale, solarisation above 128 and Gaussian blur."""
    choice = random.randrange(3)
    return (GRAYSCALE, SOLARIZE)[choice] if choice < 2 else draw_blur(random)


def _without_ends(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """An image without most of what a centre of this aspect leaves out, if it is very much longer than that.

    The ends are cut off far outside of the centre: resized with the rest they would not fit into memory.
    """
    height, width = size
    unit = min(image.height / height, image.width / width)
    left, top = (
        max(0, int(side - LONGEST * unit * wanted) // 2)
        for side, wanted in ((image.width, width), (image.height, height))
    )
    return image.crop((left, top, image.width - left, image.height - top)) if left or top else image


def _thick_enough(image: Image.Image, size: Sequence[int]) -> Image.Image:
    """An image of which a line is left where its longer side is made to fit, which timm would round to nothing."""
    height, width = size
    least = math.floor(max(image.height / height, image.width / width) / 2) + 1
    if min(image.size) >= least:
        return image
    return image.resize((max(image.width, least), max(image.height, least)), Image.Resampling.NEAREST)


def to_tensor(image: Image.Image | Tensor) -> Tensor:
    """An RGB image as bytes [H, W, 3], if it is not that already."""
    if isinstance(image, Tensor):
        return image
    # Twice as fast for small images as by way of NumPy's array interface.
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return pixels.view(image.height, image.width, 3)
