"""Several views of each image, for self-supervision: the crops of DINOv2, and those of DinoBloom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor

from quickvit.data.colors import GRAYSCALE, SOLARIZE, UNCHANGED, Change, draw_blur, draw_jitter
from quickvit.data.crops import Crop, Drawn, Uncropped, draw_box
from quickvit.data.loader import Loaded, StepLoader, collate, stack
from quickvit.data.masking import BlockMasking
from quickvit.data.seeds import derived_seed
from quickvit.data.sources import Source
from quickvit.data.transforms import RandomTransform, Where, to_tensor

# DINOv2's: brightness, contrast, saturation, hue.
JITTER = (0.4, 0.4, 0.2, 0.1)
GLOBAL_SCALE = (0.32, 1.0)
LOCAL_SCALE = (0.05, 0.32)


@dataclass(frozen=True)
class ViewTransform(RandomTransform):
    """A random crop of an image, moved and coloured; what happens to it has a probability each.

    scale: area of the crop, relative to the image's. mirror: left to right. flip: upside down. turn: by 90°.
    jitter: brightness, contrast, saturation and hue change. grayscale, blur, solarize: of values above 128.
    """

    scale: tuple[float, float] = GLOBAL_SCALE
    mirror: float = 0.5
    flip: float = 0.0
    turn: float = 0.0
    jitter: float = 0.8
    grayscale: float = 0.2
    blur: float = 0.5
    solarize: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"scale must be two rising numbers above 0 and at most 1, got {self.scale}")
        for name in ("mirror", "flip", "turn", "jitter", "grayscale", "blur", "solarize"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        if self.turn and self.size[0] != self.size[1]:
            raise ValueError(f"only squares can be turned, got img_size {self.img_size}")

    def draw(self, height: int, width: int, seed: int) -> tuple[Crop, list[Change]]:
        """The crop, how it is moved, and its colours."""
        random = Random(seed)
        box = draw_box(height, width, random, self.scale)
        crop = Crop(
            *box, *(random.random() < probability for probability in (self.mirror, self.flip, self.turn))
        )
        changes = draw_jitter(random, *JITTER) if random.random() < self.jitter else [UNCHANGED] * len(JITTER)
        changes.append(GRAYSCALE if random.random() < self.grayscale else UNCHANGED)
        changes.append(draw_blur(random) if random.random() < self.blur else UNCHANGED)
        changes.append(SOLARIZE if random.random() < self.solarize else UNCHANGED)
        return crop, changes


class Views(NamedTuple):
    """Global and local views; of batches normalised, [B, G, 3, H, W] and [B, L, 3, h, w]."""

    global_views: Any
    local_views: Any


@dataclass(frozen=True)
class MultiCrop:
    """Global and local views of an image, each drawn from a seed of its own.

    squeeze: the side of a square that images are squeezed into first, None to take them as they are.
    """

    global_views: tuple[ViewTransform, ...]
    local_views: tuple[ViewTransform, ...]
    squeeze: int | None = None

    @property
    def takes_bytes(self) -> bool:
        """Whether `pixels` wants nothing of an image but its bytes [H, W, 3], and takes them in its place."""
        return self.global_views[0].takes_bytes and self.squeeze is None

    def pixels(self, image: Image.Image | Tensor, seed: int) -> Views | Uncropped:
        """The views as bytes; or the image, once, with the numbers of its views."""
        if self.squeeze is not None:
            assert isinstance(image, Image.Image)
            image = image.resize((self.squeeze, self.squeeze), Image.Resampling.LANCZOS)
        views = [
            (view, derived_seed(seed, number))
            for number, view in enumerate((*self.global_views, *self.local_views))
        ]
        if self.global_views[0].takes_bytes:
            pixels = to_tensor(image)
            height, width, _ = pixels.shape
            drawn = [view.draw(height, width, seed) for view, seed in views]
            return Uncropped(pixels, self._split(drawn, _record))
        return self._split([view.pixels(image, seed) for view, seed in views], stack)

    def normalize(self, pixels: Views | Uncropped) -> Views:
        """Views in the colours that the model expects."""
        if isinstance(pixels, Uncropped):
            image = pixels.pixels
            pixels = Views(
                *(Uncropped(image, drawn) if isinstance(drawn, Drawn) else drawn for drawn in pixels.drawn)
            )
        kinds = (self.global_views, self.local_views or self.global_views)
        return Views(*(views[0].normalize(part) for views, part in zip(kinds, pixels, strict=True)))

    def _split(self, views: Sequence[Any], join: Callable[[Sequence[Any]], Any]) -> Views:
        number = len(self.global_views)
        local = join(views[number:]) if self.local_views else torch.empty(0, 3, 0, 0, dtype=torch.uint8)
        return Views(join(views[:number]), local)


def _record(views: Sequence[tuple[Crop, list[Change]]]) -> Drawn:
    return Drawn.record(*zip(*views, strict=True))


def dinov2_views(
    global_size: int = 224,
    local_size: int = 96,
    local_views: int = 8,
    *,
    global_scale: tuple[float, float] = GLOBAL_SCALE,
    local_scale: tuple[float, float] = LOCAL_SCALE,
    colors: Where = "workers",
    crops: Where = "workers",
) -> MultiCrop:
    """DINOv2's views: two global ones, blurred always and seldom, the second solarised at times; and local ones.

    The probabilities are those that DINO, BYOL and DINOv2's configuration name. In DINOv2's released code they
    are those of leaving the blur out, so that its first view is never blurred and its second one nearly always.
    """
    first = ViewTransform(global_size, scale=global_scale, blur=1.0, colors=colors, crops=crops)
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
    colors: Where = "workers",
    crops: Where = "workers",
) -> MultiCrop:
    """DinoBloom's views of cells: in all eight poses, and with colours that keep their meaning.

    By default there are no local ones: the loss between global and local crops did harm there.
    """
    poses: dict[str, Any] = {"mirror": 0.5, "flip": 0.5, "turn": 0.5, "grayscale": 0.0}
    whole = ViewTransform(global_size, scale=global_scale, blur=0.1, colors=colors, crops=crops, **poses)
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
        for views, *others in self.load(start, stop):
            yield ViewBatch(*views, *others)


class _Collated(NamedTuple):
    views: Any
    masks: Tensor
    indices: Tensor


@dataclass(frozen=True)
class _Collate:
    """Makes a batch of views and draws its masks, in the workers."""

    masking: BlockMasking
    seed: int

    def __call__(self, samples: Sequence[Loaded], step: int, first: int) -> _Collated:
        return _Collated(
            collate([sample.images for sample in samples]),
            self.masking(derived_seed(self.seed, step, "masks"), first, len(samples)),
            torch.tensor([sample.number for sample in samples]),
        )
