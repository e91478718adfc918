"""Figures of what the symmetry does to weights: the blocks of a linear layer, and the patch filters by irrep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from quickvit.group import Block, DihedralGroup, Irrep
from quickvit.layers import OcticLinear
from quickvit.report.svg import canvas, to_svg
from quickvit.report.weights import SUBSCRIPTS, component_name, dense_weight

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One colour for each irrep, in their order; of middling lightness, for light and dark pages.
COLOURS = ("#9467c8", "#d2498f", "#d08a12", "#849c2a", "#2a9d8f", "#3b7dc4", "#b0604d")
GREY = "#8a8a8a"
# Filters side by side.
PER_ROW = 4


# ---------------------------------------------------------------------- weights


def draw_blocks(layer: OcticLinear) -> str:
    """The dense matrix of an octic linear layer in the regular basis and in the Fourier basis, where it is blocks."""
    weight, regular = dense_weight(layer), dense_weight(layer, regular=True)
    group = layer.in_layout.group
    blocks = list(zip(layer.out_layout.blocks, layer.in_layout.blocks, strict=True))
    colours = [_colour(group, rows.irrep) for rows, _ in blocks]
    fewer_weights = weight.numel() / sum(part.numel() for part in layer.weights)
    fewer_products = weight.numel() / weight.count_nonzero().item()
    notes = {
        "regular basis": f"{weight.numel():,} products for each token",
        "Fourier basis": f"{fewer_weights:.3g}× fewer weights, {fewer_products:.3g}× fewer products",
    }
    with canvas(8.6, 4.3) as figure:
        left, right = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.02, right=0.98, top=0.86, bottom=0.13, wspace=0.22)
        left.imshow(_tinted(regular, [(slice(None), slice(None), GREY)]), interpolation="none")
        parts = [(r.slice, c.slice, colour) for (r, c), colour in zip(blocks, colours, strict=True)]
        right.imshow(_tinted(weight, parts), interpolation="none")
        for (rows, columns), colour in zip(blocks, colours, strict=True):
            _outline(right, rows, columns, colour)
            name = component_name(rows.irrep, rows.component)
            middle, side = (rows.start + rows.stop - 1) / 2, columns.stop + weight.shape[1] / 60
            right.text(side, middle, name, color=colour, va="center", weight="bold", size=11)
            if rows.component:
                _tie(right, rows, columns, colour)
        for axes, (title, note) in zip((left, right), notes.items(), strict=True):
            axes.set_title(title, size=12, weight="bold", pad=8)
            axes.set_xlabel(note, size=10.5, labelpad=8)
            axes.set(xticks=[], yticks=[])
        words = f"The weights of an equivariant linear layer of {group} in two bases: full, and in blocks."
        return to_svg(figure, words)


def _tinted(weight: Tensor, parts: Sequence[tuple[slice, slice, str]]) -> np.ndarray:
    """Pixels [F, C, 4] in the colours of the parts; a larger weight is more opaque."""
    from matplotlib.colors import to_rgb

    pixels = np.zeros((*weight.shape, 4))
    for rows, columns, colour in parts:
        pixels[rows, columns, :3] = to_rgb(colour)
        size = weight[rows, columns].abs()
        pixels[rows, columns, 3] = 0.08 + 0.92 * (size / size.max().clamp(min=1e-12)).numpy()
    return pixels


def _outline(axes: Axes, rows: Block, columns: Block, colour: str) -> None:
    from matplotlib.patches import Rectangle

    corner = (columns.start - 0.5, rows.start - 0.5)
    axes.add_patch(Rectangle(corner, columns.width, rows.width, fill=False, ec=colour, lw=1.5, clip_on=False))


def _tie(axes: Axes, rows: Block, columns: Block, colour: str) -> None:
    """An arrow from the second block of a two-dimensional irrep to the first above it: they are one weight."""
    style = {"arrowstyle": "<->", "connectionstyle": "arc3,rad=-0.35", "color": colour, "lw": 1.5}
    above = (columns.start - columns.width / 2 - 0.5, rows.start + 0.5)
    axes.annotate("", above, (columns.start - 1, (rows.start + rows.stop - 1) / 2), arrowprops=style)
    axes.text(above[0], rows.stop - rows.width / 8, "one weight", color=colour, ha="right", size=10)


def _colour(group: DihedralGroup, irrep: Irrep) -> str:
    return COLOURS[group.irreps.index(irrep) % len(COLOURS)]


# ---------------------------------------------------------------------- filters


def draw_filters(filters: Mapping[str, Tensor]) -> str:
    """The first principal components of a lift's filters, as `principal_filters` finds them."""
    irreps = list(dict.fromkeys(name.rstrip(SUBSCRIPTS) for name in filters))
    with canvas(8.6, 0.55 + 8.2 / len(filters)) as figure:
        grid = figure.subplots(1, len(filters))
        for axes, (name, components) in zip(grid, filters.items(), strict=True):
            axes.imshow(_mosaic(components), interpolation="none")
            colour = COLOURS[irreps.index(name.rstrip(SUBSCRIPTS)) % len(COLOURS)]
            axes.set_title(name, size=11, weight="bold", color=colour, pad=6)
            axes.set_axis_off()
        figure.subplots_adjust(left=0.005, right=0.995, top=0.85, bottom=0.02, wspace=0.08)
        return to_svg(figure, "The first principal components of the patch filters, irrep by irrep.")


def _mosaic(filters: Tensor) -> np.ndarray:
    """Filters [n, in, P, P] in rows, as pixels [H, W, 4]: grey is zero, and the gaps are transparent."""
    count, _, size, _ = filters.shape
    colours = filters[:, :3] if filters.shape[1] >= 3 else filters[:, :1].expand(-1, 3, -1, -1)
    colours = 0.5 + colours / colours.abs().amax((1, 2, 3), keepdim=True).clamp(min=1e-12) / 2
    step = size + max(1, size // 8)
    side = PER_ROW * step - (step - size)
    pixels = np.zeros((side, side, 4))
    for place in range(count):
        y, x = (step * index for index in divmod(place, PER_ROW))
        pixels[y : y + size, x : x + size, :3] = colours[place].permute(1, 2, 0).numpy()
        pixels[y : y + size, x : x + size, 3] = 1
    return pixels
