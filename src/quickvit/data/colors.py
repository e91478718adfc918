"""Changes of colour: drawn for each image, and carried out on it by Pillow or on a whole batch on its device.

A change is a kind and an amount. Pillow rounds to bytes after each one and blurs with boxes; on a device nothing is
rounded, and the blur is Gaussian.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import cache
from random import Random
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageFilter, ImageOps
from torch import Tensor
from torch.nn import functional
from torchvision.transforms import functional as torchvision

# Standard deviations of the blur in pixels, in DeiT III and in DINOv2.
BLUR = (0.1, 2.0)
# Where a Gaussian of the widest blur has ended.
REACH = 6
# Pillow's weights of red, green and blue in a gray value.
GRAY = (0.299, 0.587, 0.114)


class Kind(IntEnum):
    """What a change changes. Amounts: factors of the first three, turns, standard deviation, threshold."""

    NOTHING = 0
    BRIGHTNESS = 1
    CONTRAST = 2
    SATURATION = 3
    HUE = 4
    BLUR = 5
    SOLARIZE = 6


Change = tuple[Kind, float]
UNCHANGED: Change = (Kind.NOTHING, 0.0)
GRAYSCALE: Change = (Kind.SATURATION, 0.0)
SOLARIZE: Change = (Kind.SOLARIZE, 128.0)


class Unpainted(NamedTuple):
    """Bytes [..., 3, H, W] and the changes [..., S, 2] that they are to undergo, one after the other."""

    pixels: Tensor
    changes: Tensor


# ---------------------------------------------------------------------- drawn


def draw_blur(random: Random) -> Change:
    """A Gaussian blur."""
    return Kind.BLUR, random.uniform(*BLUR)


def draw_jitter(
    random: Random, brightness: float, contrast: float, saturation: float, hue: float = 0.0
) -> list[Change]:
    """Brightness, contrast and saturation in random order, each by a factor from 1 ± strength; the hue by ± turns."""
    ranges = [
        (kind, max(0.0, 1 - strength), 1 + strength)
        for kind, strength in (
            (Kind.BRIGHTNESS, brightness),
            (Kind.CONTRAST, contrast),
            (Kind.SATURATION, saturation),
        )
    ]
    if hue:
        ranges.append((Kind.HUE, -hue, hue))
    random.shuffle(ranges)
    return [(kind, random.uniform(low, high)) for kind, low, high in ranges]


# ---------------------------------------------------------------------- by Pillow


def adjust_contrast(image: Image.Image, factor: float) -> Image.Image:
    """torchvision's, to the bit; the mean of a small image takes Pillow longer than all the rest."""
    counts = np.array(image.convert("L").histogram())
    mean = int(counts @ np.arange(256) / counts.sum() + 0.5)
    return Image.blend(Image.new("RGB", image.size, (mean, mean, mean)), image, factor)


def adjust_hue(image: Image.Image, turns: float) -> Image.Image:
    """torchvision's, to the bit; the way back from hues takes Pillow longer than all other colour changes."""
    hsv = np.asarray(image.convert("HSV"))
    pixels = np.roll(_below_value(), -int(turns * 255), axis=0).take(hsv[..., 0], axis=0)
    pixels *= hsv[..., 1:2]
    np.subtract(1, pixels, out=pixels)
    pixels *= hsv[..., 2:]
    pixels += 0.5
    return Image.fromarray(pixels.astype(np.uint8))


@cache
def _below_value() -> np.ndarray:
    """By which share of the value a colour lies below it, for each hue and a saturation of 1 of 255: [256, 3]."""
    hue = np.linspace(0, 6, 256)
    share = np.stack([abs(hue - 3) - 1, 2 - abs(hue - 2), 2 - abs(hue - 4)], axis=1)
    below: np.ndarray = ((1 - share.clip(0, 1)) / 255).astype(np.float32)
    return below


_PILLOW: dict[Kind, Callable[[Image.Image, float], Image.Image]] = {
    Kind.NOTHING: lambda image, _: image,
    Kind.BRIGHTNESS: torchvision.adjust_brightness,
    Kind.CONTRAST: adjust_contrast,
    Kind.SATURATION: torchvision.adjust_saturation,
    Kind.HUE: adjust_hue,
    Kind.BLUR: lambda image, sigma: image.filter(ImageFilter.GaussianBlur(sigma)),
    Kind.SOLARIZE: lambda image, threshold: ImageOps.solarize(image, round(threshold)),
}


def paint_image(image: Image.Image, changes: Sequence[Change]) -> Image.Image:
    """An image after its changes."""
    for kind, amount in changes:
        image = _PILLOW[kind](image, amount)
    return image


# ---------------------------------------------------------------------- on a device


@cache
def color(values: tuple[float, ...], device: torch.device) -> Tensor:
    """A number for each channel [3, 1, 1]; kept, since a GPU would be waited for to take it anew with each batch."""
    return torch.tensor(values, device=device).view(3, 1, 1)


def paint_batch(pixels: Tensor, changes: Tensor) -> Tensor:
    """Levels [..., 3, H, W] from 0 to 255 after the changes [..., S, 2] of each, as float32."""
    x = pixels.reshape(-1, *pixels.shape[-3:]).float()
    changes = changes.reshape(len(x), -1, 2)
    # What is to be done is known on the host, which then need not wait for the device.
    needed = [set(column.tolist()) for column in changes[..., 0].T] if changes.is_cpu else None
    changes = changes.to(x.device, non_blocking=True)
    for step in range(changes.shape[1]):
        kinds, amounts = (column.view(-1, 1, 1, 1) for column in changes[:, step].unbind(-1))
        for members, identity, change in _CHANGES:
            if needed is None or needed[step] & set(members):
                mine = (kinds >= members[0]) & (kinds <= members[-1])
                x = change(x, torch.where(mine, amounts, identity), kinds).clamp_(0, 255)
    return x.view(pixels.shape)


def _blend(x: Tensor, factors: Tensor, kinds: Tensor) -> Tensor:
    """Away from, or towards, black (brightness), the mean gray (contrast) or each pixel's gray (saturation)."""
    gray = (x * color(GRAY, x.device)).sum(1, keepdim=True)
    mean = gray.mean((2, 3), keepdim=True)
    other = torch.where(kinds == Kind.SATURATION, gray, torch.where(kinds == Kind.CONTRAST, mean, 0.0))
    return torch.lerp(other, x, factors)


def _turn_hue(x: Tensor, turns: Tensor, _: Tensor) -> Tensor:
    """Move the hue around the circle, and leave value and saturation."""
    red, green, blue = x.split(1, 1)
    value = x.amax(1, keepdim=True)
    chroma = value - x.amin(1, keepdim=True)
    safe = chroma.clamp(min=torch.finfo(x.dtype).tiny)
    sixths = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, (blue - red) / safe + 2, (red - green) / safe + 4),
    )
    place = (sixths + 6 * turns + color((5.0, 3.0, 1.0), x.device)) % 6
    return value - chroma * torch.minimum(place, 4 - place).clamp(0, 1)


def _blur(x: Tensor, sigmas: Tensor, _: Tensor) -> Tensor:
    """A Gaussian blur of each image by its own standard deviation; 0 leaves it sharp."""
    places = torch.arange(-REACH, REACH + 1, device=x.device, dtype=x.dtype)
    weights = (-0.5 * (places / sigmas.view(-1, 1).clamp(min=1e-3)).square()).softmax(1)
    weights = weights.repeat_interleave(3, 0)[:, None, None]
    rows = functional.pad(x.flatten(0, 1)[None], (REACH,) * 4, mode="replicate")
    rows = functional.conv2d(rows, weights, groups=len(weights))
    return functional.conv2d(rows, weights.mT, groups=len(weights))[0].view_as(x)


def _solarize(x: Tensor, thresholds: Tensor, _: Tensor) -> Tensor:
    return torch.where(x >= thresholds, 255 - x, x)


# Consecutive kinds that one function serves, the amount that changes nothing, the function.
_CHANGES: tuple[tuple[tuple[Kind, ...], float, Callable[[Tensor, Tensor, Tensor], Tensor]], ...] = (
    ((Kind.BRIGHTNESS, Kind.CONTRAST, Kind.SATURATION), 1.0, _blend),
    ((Kind.HUE,), 0.0, _turn_hue),
    ((Kind.BLUR,), 0.0, _blur),
    ((Kind.SOLARIZE,), 256.0, _solarize),
)
