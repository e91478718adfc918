"""Crops: drawn for each image, and carried out on it by Pillow or on a whole batch on its device.

Both resample with the same weights, which for a batch is two products of matrices. Pillow rounds to bytes after each,
a device at the end, so that levels differ by one at most; except for a few pixels next to pure black or white, beyond
which the filter reaches, where Pillow takes rows before columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

import torch
from PIL import Image
from timm.data.transforms import str_to_pil_interp
from torch import Tensor


class Crop(NamedTuple):
    """A part of an image; then mirrored left to right, flipped upside down and turned by 90°, in this order."""

    top: int
    left: int
    height: int
    width: int
    mirror: bool = False
    flip: bool = False
    turn: bool = False


class Drawn(NamedTuple):
    """What is to be made of images: crops [..., 7], and changes of their colours [..., S, 2]."""

    crops: Tensor
    changes: Tensor

    @classmethod
    def record(cls, crops: Sequence[Any], changes: Sequence[Any]) -> Drawn:
        """One `Crop` with its changes, or several and those of each."""
        numbers = torch.tensor(crops, dtype=torch.float32)
        return cls(numbers, torch.tensor(changes, dtype=torch.float32).view(*numbers.shape[:-1], -1, 2))


class Uncropped(NamedTuple):
    """Whole images as bytes [..., H, W, 3], and what is to be made of each: `Drawn`, or one for each kind of view."""

    pixels: Tensor
    drawn: Any


# ---------------------------------------------------------------------- drawn


def draw_box(
    height: int,
    width: int,
    random: Random,
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> tuple[int, int, int, int]:
    """Top, left, height and width as timm draws them; the centre with the nearest aspect if ten draws do not fit."""
    for _ in range(10):
        area = random.uniform(*scale) * height * width
        aspect = math.exp(random.uniform(math.log(ratio[0]), math.log(ratio[1])))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            return random.randint(0, height - h), random.randint(0, width - w), h, w
    h, w = min(height, max(1, round(width / ratio[0]))), min(width, max(1, round(height * ratio[1])))
    return (height - h) // 2, (width - w) // 2, h, w


# ---------------------------------------------------------------------- by Pillow


_MOVES = (Image.Transpose.FLIP_LEFT_RIGHT, Image.Transpose.FLIP_TOP_BOTTOM, Image.Transpose.ROTATE_90)


def crop_image(image: Image.Image, crop: Crop, size: tuple[int, int], interpolation: str) -> Image.Image:
    """A part of an image, resized to height and width and moved."""
    top, left, height, width, *moves = crop
    image = image.crop((left, top, left + width, top + height))
    image = image.resize(size[::-1], str_to_pil_interp(interpolation))
    for wanted, move in zip(moves, _MOVES, strict=True):
        if wanted:
            image = image.transpose(move)
    return image


# ---------------------------------------------------------------------- on a device


def crop_batch(pixels: Tensor, crops: Tensor, size: tuple[int, int], interpolation: str) -> Tensor:
    """Crops [..., 7], or V of each image [..., V, 7], of bytes [..., H, W, 3], as whole float32 [..., 3, h, w]."""
    (image_height, image_width), (height, width) = pixels.shape[-3:-1], size
    images = pixels.reshape(-1, *pixels.shape[-3:]).permute(0, 2, 3, 1)
    numbers = crops.reshape(-1, 7, 1).to(pixels.device, non_blocking=True)
    top, left, box_height, box_width, mirror, flip, turn = numbers.unbind(1)
    # A turn is a mirroring and then a transposition.
    columns = _weights(left, box_width, mirror != turn, image_width, width, interpolation)
    rows = _weights(top, box_height, flip > 0, image_height, height, interpolation)
    # All views of an image at once, which is not copied for them: [B, V · w, W] times [B, W, 3 · H].
    x = columns.view(len(images), -1, image_width) @ images.flatten(2).float()
    x = x.clamp_(0, 255).view(-1, width * 3, image_height) @ rows.mT
    x = x.round_().clamp_(0, 255).view(-1, width, 3, height)
    upright, turned = x.permute(0, 2, 3, 1), x.permute(0, 2, 1, 3)
    if height == width:
        upright = torch.where(turn[:, :, None, None] > 0, turned, upright)
    return upright.contiguous().view(*crops.shape[:-1], 3, height, width)


def _weights(
    start: Tensor, length: Tensor, backwards: Tensor, pixels: int, size: int, interpolation: str
) -> Tensor:
    """Parts that the pixels of a line have in `size` new ones: [N, size, pixels], of boxes [N, 1].

    A filter as wide as a new pixel, or as an old one if that is wider, ends where the box ends.
    """
    scale = length / size
    new = torch.arange(size, device=start.device) + 0.5
    new = torch.where(backwards, size - new, new) * scale
    old = torch.arange(pixels, device=start.device) + 0.5 - start
    distances = (old[:, None] - new[:, :, None]).abs_() / scale.clamp(min=1)[:, :, None]
    weights = FILTERS[interpolation](distances) * ((old > 0) & (old < length))[:, None]
    return weights.div_(weights.sum(-1, keepdim=True))


def _bicubic(x: Tensor) -> Tensor:
    """Keys' cubic with a = −1/2."""
    near = (1.5 * x - 2.5) * x.square() + 1
    far = ((2.5 - 0.5 * x) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, 0.0))


FILTERS: dict[str, Callable[[Tensor], Tensor]] = {
    "bilinear": lambda x: (1 - x).clamp_(min=0),
    "bicubic": _bicubic,
}
"""Weights at a distance, by the name of the interpolation."""
