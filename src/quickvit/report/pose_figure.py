"""Figures of an image in its eight poses: the Cayley diagram with its features, and what two models answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor
from torchvision.transforms.functional import resize

from quickvit.group import D8, Element, act_on_image
from quickvit.report.exploration import POSES, Exploration, symbol
from quickvit.report.svg import ACCENT, ACCENT_2, INK, LINE, MUTED, canvas, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

POSITIVE, NEGATIVE = "#de6226", "#2b7cbe"
# Pixels of an image in a figure, and letters of the name of a class.
THUMBNAIL, LETTERS = 96, 12
TURN, MIRROR = Element(0, 1), Element(1, 0)
# Inches of the diagram, and in parts of them: the sides of an image, and the room for arrows around it.
DIAGRAM = (8.6, 7.4)
SIDE, RISE = 0.14, 0.14 * DIAGRAM[0] / DIAGRAM[1]
GAP, HEADING = 0.008, 0.04


# ---------------------------------------------------------------------- features


def draw_cayley(exploration: Exploration, image: int = 0) -> str:
    """The Cayley diagram of the group: an image in its eight poses, the features of each, and what leads where.

    Features are a channel of A1 in colours and a pair of E as arrows, computed from each of the eight images.
    """
    names = [copy.irrep.name for copy in exploration.copies]
    invariant, arrows = (exploration.features[names.index(name)][image] for name in ("A1", "E"))
    values, arrows = (maps / maps.norm(dim=1).max().clamp(min=1e-30) for maps in (invariant, arrows))
    with canvas(*DIAGRAM) as figure:
        for index, g in enumerate(POSES):
            left, bottom = _place(g)
            below = figure.add_axes((left, bottom, SIDE, RISE))
            _draw_features(below, values[index, 0], arrows[index])
            above = figure.add_axes((left, bottom + RISE + GAP / 2, SIDE, RISE))
            above.imshow(_pose(exploration, image, g), interpolation="none")
            above.set_title(symbol(g), size=13, style="italic", pad=4)
            for axes in (above, below):
                axes.set(xticks=[], yticks=[])
        _draw_generators(figure)
        words = "An image in its eight poses and the features of each, joined by turns and mirrorings."
        return to_svg(figure, words)


def _place(g: Element) -> tuple[float, float]:
    """Left and bottom of a pose: the rotations in one row, their mirror images below."""
    return 0.045 + 0.257 * g.turns, 0.06 if g.mirror else 0.56


def _draw_features(axes: Axes, values: Tensor, arrows: Tensor) -> None:
    """Values [H, W] in colours, and arrows [2, H, W], x to the right and y upwards, on the patches."""
    from matplotlib.colors import to_rgba_array

    height, width = values.shape
    pixels = to_rgba_array([NEGATIVE, POSITIVE])[(values > 0).long().numpy()]
    pixels[..., 3] = 0.75 * values.abs().numpy()
    axes.imshow(pixels, interpolation="none")
    y, x = np.mgrid[:height, :width]
    style: dict[str, Any] = {"color": INK, "pivot": "mid", "width": 0.014, "headwidth": 4, "minlength": 0}
    axes.quiver(x, y, *arrows.numpy(), scale=0.9 * width, **style)


def _draw_generators(figure: Figure) -> None:
    """Arrows from each pose to what a turn and a mirroring make of it."""
    for g in POSES:
        (left, bottom), (x, _) = _place(g), _place(D8.product(TURN, g))
        middle = bottom + RISE + GAP / 4
        neighbours = abs(x - left) < 2 * SIDE
        if neighbours and x > left:
            _arrow(figure, (left + SIDE + GAP, middle), (x - GAP, middle), ACCENT)
        elif neighbours:
            _arrow(figure, (left - GAP, middle), (x + SIDE + GAP, middle), ACCENT)
        else:
            # The way round: above the rotations, below their mirror images.
            edge = bottom - GAP if g.mirror else bottom + 2 * RISE + HEADING + GAP
            _arrow(figure, (left + SIDE / 2, edge), (x + SIDE / 2, edge), ACCENT, bend=0.05)
        if not g.mirror:
            x, y = _place(D8.product(MIRROR, g))
            end = (x + SIDE / 2, y + 2 * RISE + HEADING + GAP)
            _arrow(figure, (left + SIDE / 2, bottom - GAP), end, ACCENT_2, "<|-|>")
    figure.text(0.5, 0.975, "r: a quarter turn anti-clockwise", color=ACCENT, ha="center", size=10.5)
    figure.text(0.13, 0.49, "s: mirrored left to right", color=ACCENT_2, va="center", size=10.5)


def _arrow(
    figure: Figure,
    start: tuple[float, float],
    end: tuple[float, float],
    colour: str,
    head: str = "-|>",
    bend: float = 0,
) -> None:
    from matplotlib.patches import FancyArrowPatch

    style: dict[str, Any] = {"arrowstyle": head, "mutation_scale": 13, "color": colour, "lw": 1.8}
    curve = f"arc3,rad={bend}"
    figure.add_artist(
        FancyArrowPatch(start, end, connectionstyle=curve, transform=figure.transFigure, **style)
    )


# ---------------------------------------------------------------------- answers


def draw_predictions(exploration: Exploration, image: int = 0) -> str:
    """An image in its eight poses, and the answers of both models with their confidence."""
    models, colours = exploration.answers, (ACCENT_2, ACCENT)
    with canvas(8.6, 2.7) as figure:
        pictures, *rows = figure.subplots(1 + len(models), len(POSES), height_ratios=(1, 0.55, 0.55))
        figure.subplots_adjust(left=0.08, right=0.995, top=0.9, bottom=0.02, wspace=0.09, hspace=0.12)
        for axes, g in zip(pictures, POSES, strict=True):
            axes.imshow(_pose(exploration, image, g), interpolation="none")
            axes.set(xticks=[], yticks=[])
            axes.set_title(symbol(g), size=11, style="italic", pad=3)
        for row, answers, colour in zip(rows, models, colours, strict=True):
            # Names of models and of classes may have dollars in them.
            style: dict[str, Any] = {"weight": "bold", "size": 11, "ha": "right", "va": "center"}
            row[0].text(-0.15, 0, answers.model, color=colour, parse_math=False, **style)
            labels = [exploration.classes[label] for label in answers.labels[image].tolist()]
            confidences = answers.probabilities[image].amax(-1).tolist()
            for axes, label, confidence in zip(row, labels, confidences, strict=True):
                _draw_answer(axes, label, confidence, colour, same=label == labels[0])
        counts = [f"{answers.model} {len(set(answers.labels[image].tolist()))}" for answers in models]
        words = f"An image in its eight poses. Number of different answers: {', '.join(counts)}."
        return to_svg(figure, words)


def _draw_answer(axes: Axes, label: str, confidence: float, colour: str, *, same: bool) -> None:
    """The likeliest class and a bar of its probability; faint where it is not the `same` as upright."""
    axes.barh(0, 1, height=0.24, color=LINE, alpha=0.5)
    axes.barh(0, confidence, height=0.24, color=colour if same else MUTED)
    label = label if len(label) <= LETTERS else f"{label[: LETTERS - 1]}…"
    style: dict[str, Any] = {"weight": "bold"} if same else {"style": "italic", "color": MUTED}
    axes.text(0, 0.55, label, size=8.5, va="center", parse_math=False, **style)
    axes.text(1, -0.5, f"{100 * confidence:.0f} %", size=8, color=MUTED, ha="right", va="center")
    axes.set(xlim=(0, 1), ylim=(-0.9, 1.0))
    axes.set_axis_off()


def _pose(exploration: Exploration, image: int, g: Element) -> np.ndarray:
    """An image in a pose, not larger than it is shown, as pixels [H, W, 3]."""
    pixels = exploration.images[image]
    if pixels.shape[-1] > THUMBNAIL:
        pixels = resize(pixels, [THUMBNAIL, THUMBNAIL], antialias=True)
    return act_on_image(pixels, g).permute(1, 2, 0).numpy()
