"""Turned and mirrored images, to ask a model that was trained upright.

Images are turned after they were cropped for the model, about their centre: by multiples of 90° exactly, pixel by
pixel, else by bilinear interpolation. What then comes from outside is 0, the mean colour of normalised images; a turn
by 45° loses 17% of the area at the corners. `cut_circle` takes the corners away in all poses alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from quickvit.data import derived_seed

Mode = Literal["bilinear", "nearest"]

RANDOM = {"quarter": "random quarter turn", "any": "random angle"}


@dataclass(frozen=True)
class Pose:
    """How images are shown.

    rotate: degrees anti-clockwise; "quarter" turns each image by a random multiple of 90°, as in the paper's
        evaluation out of distribution, and "any" by a random angle.
    mirror: left to right, before the rotation.
    """

    rotate: float | Literal["quarter", "any"] = 0.0
    mirror: bool = False

    def __str__(self) -> str:
        turned = RANDOM[self.rotate] if isinstance(self.rotate, str) else f"{self.rotate:g}°"
        words = ["mirrored"] * self.mirror + [turned] * bool(self.rotate)
        return " ".join(words) or "upright"

    @property
    def random(self) -> bool:
        """Whether each image is turned by an angle of its own."""
        return isinstance(self.rotate, str)

    def show(self, images: Tensor, indices: Tensor, seed: int = 0, mode: Mode = "bilinear") -> Tensor:
        """Images [B, C, H, W] in this pose; a random one is a function of the seed and an image's index."""
        images = images.flip(-1) if self.mirror else images
        if not isinstance(self.rotate, str):
            return rotate(images, self.rotate, mode)
        seeds = [derived_seed(seed, index, "rotation") for index in indices.tolist()]
        if self.rotate == "quarter":
            return rotate(images, [90.0 * (seed % 4) for seed in seeds], mode)
        return rotate(images, [360 * seed / 2**63 for seed in seeds], mode)

    def show_masks(self, masks: Tensor, indices: Tensor, seed: int = 0, outside: int = 255) -> Tensor:
        """Labels [B, H, W], uint8, moved as `show` moves the pixels of their images; what comes from outside is
        labelled so."""
        # Where there is no image `show` has zeros.
        shifted = (masks.float() - outside)[:, None]
        return (self.show(shifted, indices, seed, "nearest")[:, 0] + outside).to(masks.dtype)


UPRIGHT = Pose()
POSES = (
    UPRIGHT,
    Pose(90.0),
    Pose(180.0),
    Pose(270.0),
    Pose(mirror=True),
    Pose("quarter"),
    Pose(45.0),
    Pose("any"),
)
"""The rotations of the paper's tables (random quarter turns and 45°), and what they are made of."""


def require_square(size: tuple[int, int], poses: Sequence[Pose]) -> None:
    """Refuse poses in which images of this size are turned by an angle each."""
    if size[0] != size[1] and any(pose.random for pose in poses):
        raise ValueError(
            f"random turns need square images, the model's are {size[0]}×{size[1]}; give it another --img-size"
        )


def rotate(images: Tensor, degrees: float | Sequence[float], mode: Mode = "bilinear") -> Tensor:
    """Images [B, C, H, W] turned anti-clockwise, all alike or each by its own angle (if square).

    An angle is taken apart into quarter turns, which are exact, and a rest below 90°.
    """
    if not isinstance(degrees, Sequence):
        turns, rest = divmod(degrees, 90)
        tilted = _tilt(images, [rest] * len(images), mode) if rest else images
        return torch.rot90(tilted, int(turns), (-2, -1))
    if len(degrees) != len(images):
        raise ValueError(f"expected an angle for each of the {len(images)} images, got {len(degrees)}")
    if images.shape[-2] != images.shape[-1]:
        raise ValueError(
            "images must be square to be turned by an angle each, got "
            f"{images.shape[-2]}×{images.shape[-1]} pixels"
        )
    parts = [divmod(angle, 90) for angle in degrees]
    slanted = [i for i, (_, rest) in enumerate(parts) if rest]
    images = images.clone()
    if slanted:
        images[slanted] = _tilt(images[slanted], [parts[i][1] for i in slanted], mode)
    for turns in range(1, 4):
        chosen = [i for i, part in enumerate(parts) if part[0] % 4 == turns]
        images[chosen] = torch.rot90(images[chosen], turns, (-2, -1))
    return images


def cut_circle(images: Tensor, outside: int = 0) -> Tensor:
    """Images, or masks, [..., H, W] with one value outside of the largest circle: no pose of them has more to see."""
    height, width = images.shape[-2:]
    y, x = (torch.arange(side, device=images.device) - (side - 1) / 2 for side in (height, width))
    inside = y[:, None].square() + x.square() <= (min(height, width) / 2) ** 2
    return torch.where(inside, images, outside)


def _tilt(images: Tensor, degrees: Sequence[float], mode: Mode) -> Tensor:
    """Each image turned by its angle; the place that a pixel comes from is turned the other way."""
    height, width = images.shape[-2:]
    rows = []
    for angle in map(math.radians, degrees):
        cos, sin = math.cos(angle), math.sin(angle)
        rows.append([[cos, -sin * height / width, 0.0], [sin * width / height, cos, 0.0]])
    # Places of pixels need more digits than 16-bit images have.
    wide = images.to(torch.promote_types(images.dtype, torch.float32))
    matrices = torch.tensor(rows, dtype=wide.dtype, device=images.device)
    with torch.autocast(images.device.type, enabled=False):
        grid = functional.affine_grid(matrices, list(images.shape), align_corners=False)
        return functional.grid_sample(wide, grid, mode, align_corners=False).to(images.dtype)
