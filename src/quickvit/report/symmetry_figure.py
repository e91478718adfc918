"""Figures of what the symmetry does: to weights, to patch filters, to features, and to answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torchvision.transforms.functional import resize

from quickvit.group import (
    D8,
    Block,
    Element,
    Irrep,
    Layout,
    act_on_image,
    isotypic_to_regular,
)
from quickvit.layers import OcticLift, OcticLinear
from quickvit.models import QuickVisionTransformer
from quickvit.report.exploration import POSES, Exploration, symbol
from quickvit.report.svg import ACCENT, ACCENT_2, INK, LINE, MUTED, drawing, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# One colour for each irrep, in their order; of middling lightness, for light and dark pages.
COLOURS = ("#9467c8", "#d2498f", "#d08a12", "#849c2a", "#2a9d8f", "#3b7dc4", "#b0604d")
POSITIVE, NEGATIVE, GREY = "#de6226", "#2b7cbe", "#8a8a8a"
# The paper's figure of learned filters shows so many principal components of each.
COMPONENTS, PER_ROW = 16, 4
THUMBNAIL = 96
TURN, MIRROR = Element(0, 1), Element(1, 0)
SUBSCRIPTS = "₁₂"


# ---------------------------------------------------------------------- weights


def draw_blocks(layer: OcticLinear) -> str:
    """The dense matrix of an octic linear layer in the regular basis and in the Fourier basis, where it is blocks."""
    from matplotlib.figure import Figure

    weight, regular = dense_weight(layer), dense_weight(layer, regular=True)
    group = layer.in_layout.group
    blocks = list(zip(layer.out_layout.blocks, layer.in_layout.blocks, strict=True))
    colours = [COLOURS[group.irreps.index(rows.irrep)] for rows, _ in blocks]
    weights = sum(p.numel() for p in (layer.weight_1, layer.weight_2))
    fewer_products = weight.numel() / weight.count_nonzero().item()
    with drawing():
        figure = Figure(figsize=(8.6, 4.3))
        left, right = figure.subplots(1, 2)
        figure.subplots_adjust(left=0.02, right=0.98, top=0.86, bottom=0.13, wspace=0.22)
        left.imshow(_tinted(regular, [(slice(None), slice(None), GREY)]), interpolation="none")
        parts = [(r.slice, c.slice, colour) for (r, c), colour in zip(blocks, colours, strict=True)]
        right.imshow(_tinted(weight, parts), interpolation="none")
        for (rows, columns), colour in zip(blocks, colours, strict=True):
            _outline(right, rows.slice, columns.slice, colour)
            name = _component_name(rows.irrep, rows.component)
            middle, side = (rows.start + rows.stop - 1) / 2, columns.stop + weight.shape[1] / 60
            right.text(side, middle, name, color=colour, va="center", weight="bold", size=11)
            if rows.component:
                _tie(right, rows, columns, colour)
        for axes, title, note in (
            (left, "regular basis", f"{weight.numel():,} products for each token"),
            (
                right,
                "Fourier basis",
                f"{weight.numel() / weights:.3g}× fewer weights, {fewer_products:.3g}× fewer products",
            ),
        ):
            axes.set_title(title, size=12, weight="bold", pad=8)
            axes.set_xlabel(note, size=10.5, labelpad=8)
            axes.set(xticks=[], yticks=[])
        return to_svg(
            figure,
            f"The weights of an equivariant linear layer of {group} in two bases: full, and in blocks.",
        )


def dense_weight(layer: OcticLinear, *, regular: bool = False) -> Tensor:
    """The matrix W [F, C] of a layer without its bias in the packed basis, or Q_reg W Q_regᵀ in the regular one."""
    basis = torch.eye(layer.in_layout.channels, dtype=layer.weight_1.dtype, device=layer.weight_1.device)
    with torch.no_grad():
        weight = (layer(basis) - layer(torch.zeros_like(basis))).T.double().cpu()
    if not regular:
        return weight
    group = layer.in_layout.group
    return isotypic_to_regular(isotypic_to_regular(weight, group).T, group).T


def _tinted(weight: Tensor, parts: Sequence[tuple[slice, slice, str]]) -> np.ndarray:
    """Pixels [F, C, 4] in the colours of the parts; a larger weight is more opaque."""
    from matplotlib.colors import to_rgb

    pixels = np.zeros((*weight.shape, 4))
    for rows, columns, colour in parts:
        pixels[rows, columns, :3] = to_rgb(colour)
        size = weight[rows, columns].abs()
        pixels[rows, columns, 3] = 0.08 + 0.92 * (size / size.max().clamp(min=1e-12)).numpy()
    return pixels


def _outline(axes: Axes, rows: slice, columns: slice, colour: str) -> None:
    from matplotlib.patches import Rectangle

    corner = (columns.start - 0.5, rows.start - 0.5)
    size = (columns.stop - columns.start, rows.stop - rows.start)
    axes.add_patch(Rectangle(corner, *size, fill=False, ec=colour, lw=1.5, clip_on=False))


def _tie(axes: Axes, rows: Block, columns: Block, colour: str) -> None:
    """An arrow from the second block of a two-dimensional irrep to the first above it: they are one weight."""
    style = {"arrowstyle": "<->", "connectionstyle": "arc3,rad=-0.35", "color": colour, "lw": 1.5}
    above = (columns.start - columns.width / 2 - 0.5, rows.start + 0.5)
    axes.annotate("", above, (columns.start - 1, (rows.start + rows.stop - 1) / 2), arrowprops=style)
    axes.text(above[0], rows.stop - rows.width / 8, "one weight", color=colour, ha="right", size=10)


def _component_name(irrep: Irrep, component: int) -> str:
    return irrep.name if irrep.dim == 1 else f"{irrep.name}{SUBSCRIPTS[component]}"


# ---------------------------------------------------------------------- filters


def draw_filters(model: QuickVisionTransformer) -> str:
    """The first principal components of the lift's filters, for each component of each irrep."""
    from matplotlib.figure import Figure

    filters = principal_filters(model)
    with drawing():
        figure = Figure(figsize=(8.6, 0.55 + 8.2 / len(filters)))
        grid = figure.subplots(1, len(filters))
        blocks = Layout(model.embed_dim, model.group).blocks
        for axes, block, (name, components) in zip(grid, blocks, filters.items(), strict=True):
            axes.imshow(_mosaic(components), interpolation="none")
            colour = COLOURS[model.group.irreps.index(block.irrep)]
            axes.set_title(name, size=11, weight="bold", color=colour, pad=6)
            axes.set_axis_off()
        figure.subplots_adjust(left=0.005, right=0.995, top=0.85, bottom=0.02, wspace=0.08)
        return to_svg(
            figure, f"The first principal components of the patch filters of {model.family}, irrep by irrep."
        )


def principal_filters(model: QuickVisionTransformer, count: int = COMPONENTS) -> dict[str, Tensor]:
    """The first principal components [n, in, P, P] of the filters of each irrep; those of E₁ and E₂ are pairs.

    Channels of one irrep may be mixed at will without harm to the symmetry, so their components are of its type too.
    A filter is as good as its negative, so there is no mean to subtract.
    """
    lift = model.patch_embed
    if not isinstance(lift, OcticLift):
        raise ValueError(
            "filters come by irrep only where the lift is octic; this model was made with lift='free'"
        )
    kernel = lift.kernel().detach().double().cpu()
    found: dict[str, Tensor] = {}
    for irrep in lift.layout.group.irreps:
        blocks = [block for block in lift.layout.blocks if block.irrep == irrep]
        filters = torch.stack([kernel[block.slice] for block in blocks], dim=1)
        _, sizes, directions = torch.linalg.svd(filters.flatten(1), full_matrices=False)
        directions = directions[: min(count, int((sizes > 1e-9 * sizes[0]).sum()))]
        for component, parts in enumerate(directions.unflatten(1, filters.shape[1:]).unbind(1)):
            found[_component_name(irrep, component)] = parts
    return found


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


# ---------------------------------------------------------------------- features


def draw_cayley(exploration: Exploration, image: int = 0) -> str:
    """The Cayley diagram of the group: an image in its eight poses, the features of each, and what leads where.

    Features are a channel of A1 in colours and a pair of E as arrows, computed from each of the eight images.
    """
    from matplotlib.figure import Figure

    names = [copy.irrep.name for copy in exploration.copies]
    invariant, arrows = (exploration.features[names.index(name)][image] for name in ("A1", "E"))
    with drawing():
        figure = Figure(figsize=(8.6, 7.4))
        places = {g: _place(g) for g in POSES}
        for index, g in enumerate(POSES):
            left, bottom = places[g]
            top = figure.add_axes((left, bottom + 0.168, 0.14, 0.163))
            top.imshow(_pose(exploration, image, g), interpolation="none")
            top.set_title(symbol(g), size=13, style="italic", pad=4)
            below = figure.add_axes((left, bottom, 0.14, 0.163))
            _draw_features(
                below, invariant[index, 0], invariant.abs().max(), arrows[index], arrows.norm(dim=1).max()
            )
            for axes in (top, below):
                axes.set(xticks=[], yticks=[])
        _draw_generators(figure, places)
        return to_svg(
            figure, "An image in its eight poses and the features of each, joined by turns and mirrorings."
        )


def _place(g: Element) -> tuple[float, float]:
    """Left and bottom of a pose: the rotations in one row, their mirror images below."""
    return 0.045 + 0.257 * g.turns, 0.06 if g.mirror else 0.56


def _draw_features(axes: Axes, values: Tensor, largest: Tensor, arrows: Tensor, longest: Tensor) -> None:
    """Values [H, W] in colours, and arrows [2, H, W], x to the right and y upwards, on the patches."""
    from matplotlib.colors import to_rgba_array

    height, width = values.shape
    pixels = to_rgba_array([NEGATIVE, POSITIVE])[(values > 0).long().numpy()]
    pixels[..., 3] = 0.75 * (values.abs() / largest).numpy()
    axes.imshow(pixels, interpolation="none")
    y, x = np.mgrid[:height, :width]
    u, v = (arrows / longest).numpy()
    axes.quiver(x, y, u, v, color=INK, pivot="mid", scale=0.9 * width, width=0.014, headwidth=4, minlength=0)


def _draw_generators(figure: Figure, places: dict[Element, tuple[float, float]]) -> None:
    """Arrows from each pose to what a turn and a mirroring make of it."""
    from matplotlib.patches import FancyArrowPatch

    def arrow(
        start: tuple[float, float], end: tuple[float, float], colour: str, style: str, bend: float = 0
    ) -> None:
        figure.add_artist(
            FancyArrowPatch(
                start,
                end,
                arrowstyle=style,
                mutation_scale=13,
                color=colour,
                lw=1.8,
                connectionstyle=f"arc3,rad={bend}",
                transform=figure.transFigure,
            )
        )

    for g, (left, bottom) in places.items():
        after = D8.product(TURN, g)
        x, y = places[after]
        forward = x > left
        if abs(x - left) < 0.3:
            start = (left + (0.15 if forward else -0.01), bottom + 0.165)
            end = (x + (-0.01 if forward else 0.15), y + 0.165)
            arrow(start, end, ACCENT, "-|>")
        else:
            # The way round: above the rotations, below their mirror images.
            edge = bottom - 0.01 if g.mirror else bottom + 0.372
            arrow((left + 0.07, edge), (x + 0.07, edge), ACCENT, "-|>", bend=0.05)
        if not g.mirror:
            mirrored = places[D8.product(MIRROR, g)]
            arrow((left + 0.07, bottom - 0.008), (mirrored[0] + 0.07, mirrored[1] + 0.375), ACCENT_2, "<|-|>")
    figure.text(0.5, 0.975, "r: a quarter turn anti-clockwise", color=ACCENT, ha="center", size=10.5)
    figure.text(0.13, 0.49, "s: mirrored left to right", color=ACCENT_2, va="center", size=10.5)


# ---------------------------------------------------------------------- answers


def draw_predictions(exploration: Exploration, image: int = 0) -> str:
    """An image in its eight poses, and the answers of both models with their confidence."""
    from matplotlib.figure import Figure

    models = exploration.answers
    with drawing():
        figure = Figure(figsize=(8.6, 1.75 + 0.62 * len(models)))
        height = 1 / (1.75 + 0.62 * len(models))
        for column, g in enumerate(POSES):
            left = 0.1 + 0.1125 * column
            axes = figure.add_axes((left, 1 - 1.36 * height, 0.103, 0.103 * 8.6 * height))
            axes.imshow(_pose(exploration, image, g), interpolation="none")
            axes.set(xticks=[], yticks=[])
            axes.set_title(symbol(g), size=11, style="italic", pad=3)
            for row, answers in enumerate(models):
                place = (left, 1 - (2.02 + 0.66 * row) * height, 0.103, 0.46 * height)
                _draw_answer(figure.add_axes(place), exploration, answers.probabilities[image], column, row)
        for row, answers in enumerate(models):
            y = 1 - (1.72 + 0.66 * row) * height
            figure.text(
                0.088,
                y,
                answers.model,
                weight="bold",
                ha="right",
                va="center",
                size=11,
                color=(ACCENT, ACCENT_2)[row],
            )
        words = "; ".join(
            f"{answers.model} gives {len(set(answers.labels[image].tolist()))}" for answers in models
        )
        return to_svg(
            figure, f"One image in eight poses, and the answers of two models. Different answers: {words}."
        )


def _draw_answer(axes: Axes, exploration: Exploration, probabilities: Tensor, pose: int, row: int) -> None:
    """The likeliest class and a bar of its probability; faint where the upright image has another answer."""
    confidence, label = probabilities[pose].max(0)
    same = int(label) == int(probabilities[0].argmax())
    colour = (ACCENT, ACCENT_2)[row] if same else MUTED
    axes.barh(0, 1, height=0.24, color=LINE, alpha=0.5)
    axes.barh(0, confidence.item(), height=0.24, color=colour)
    name = exploration.classes[int(label)]
    name = name if len(name) <= 12 else f"{name[:11]}…"
    axes.text(
        0,
        0.62,
        name,
        size=8.5,
        weight="bold" if same else "normal",
        style="normal" if same else "italic",
        va="center",
    )
    axes.text(1, -0.5, f"{100 * confidence.item():.0f} %", size=8, color=MUTED, ha="right", va="center")
    axes.set(xlim=(0, 1), ylim=(-0.9, 1.0))
    axes.set_axis_off()


def _pose(exploration: Exploration, image: int, g: Element) -> np.ndarray:
    """An image in a pose, not larger than it is shown, as pixels [H, W, 3]."""
    pixels = exploration.images[image]
    if pixels.shape[-1] > THUMBNAIL:
        pixels = resize(pixels, [THUMBNAIL, THUMBNAIL], antialias=True)
    return act_on_image(pixels, g).permute(1, 2, 0).numpy()
