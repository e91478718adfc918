"""Pictures of an evaluation: a confusion matrix, and test images with what was predicted of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.colors import hsv_to_rgb
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

RIGHT, WRONG = "#0072B2", "#D55E00"
# Cells up to which a matrix has numbers in it, and classes up to which it has names beside it.
NUMBERED, NAMED = 24, 60
COLUMNS = 6
VALUES = 256


def draw_confusion(confusion: Tensor, classes: Sequence[str], path: Path) -> None:
    """The share of each true class (row) that was given each class (column)."""
    # Names of classes may have dollars in them.
    share = confusion.double() / confusion.sum(1, keepdim=True).clamp(min=1)
    side = min(14.0, 2.5 + 0.45 * len(classes))
    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.add_subplot()
    image = axes.imshow(share.numpy(), cmap="Blues", vmin=0, vmax=1)
    figure.colorbar(image, shrink=0.6, label="share of the true class")
    axes.set_xlabel("predicted")
    axes.set_ylabel("true")
    if len(classes) <= NAMED:
        axes.set_xticks(range(len(classes)), classes, rotation=90, parse_math=False)
        axes.set_yticks(range(len(classes)), classes, parse_math=False)
    if len(classes) <= NUMBERED:
        for row, column in confusion.nonzero().tolist():
            shade = "white" if share[row, column] > 0.5 else "black"
            number = str(int(confusion[row, column]))
            axes.text(column, row, number, color=shade, size=7, ha="center", va="center")
    figure.savefig(path, dpi=150)


def draw_predictions(images: Sequence[Image.Image], labels: Sequence[tuple[str, str]], path: Path) -> None:
    """Images with their true and, where it differs, their predicted class."""
    rows = -(-len(images) // COLUMNS)
    figure = Figure(figsize=(2 * COLUMNS, 2.3 * rows), layout="constrained")
    for place, (image, (true, predicted)) in enumerate(zip(images, labels, strict=True), 1):
        axes = figure.add_subplot(rows, COLUMNS, place)
        axes.imshow(image)
        axes.set_axis_off()
        words = true if true == predicted else f"{predicted}\n(is {true})"
        axes.set_title(words, size=8, color=RIGHT if true == predicted else WRONG, parse_math=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def draw_masks(
    images: Sequence[Tensor], masks: Mapping[str, Tensor], ignored: Sequence[int], path: Path
) -> None:
    """Images [3, H, W] of bytes in rows, and beside each the masks [n, H, W] of this name in colours."""
    figure = Figure(figsize=(2.5 * (1 + len(masks)), 2.6 * len(images)), layout="constrained")
    grid = figure.subplots(len(images), 1 + len(masks), squeeze=False)
    colours = _colours(ignored)
    for row, image in enumerate(images):
        shown = [
            image.permute(1, 2, 0).numpy(),
            *(colours[mask[row].long().numpy()] for mask in masks.values()),
        ]
        for axes, pixels in zip(grid[row], shown, strict=True):
            axes.imshow(pixels)
            axes.set_axis_off()
    for axes, name in zip(grid[0], ["image", *masks], strict=True):
        axes.set_title(name, size=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def _colours(ignored: Sequence[int]) -> np.ndarray:
    """A colour for every label; neighbours differ by the golden angle. Ignored ones are white."""
    labels = torch.arange(VALUES)
    hue = labels * (5**0.5 - 1) / 2 % 1
    colours = hsv_to_rgb(
        torch.stack([hue, 0.45 + 0.5 * (labels % 3) / 2, 1 - 0.4 * (labels % 4) / 3], 1).numpy()
    )
    colours[list(ignored)] = 1
    return np.asarray(colours)
