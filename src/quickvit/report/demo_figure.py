"""The picture of the demonstration: accuracies and confusions, the octic action, the steerable filters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from quickvit.group import D8, Layout, act_on_image
from quickvit.models import QuickVisionTransformer
from quickvit.report.exploration import symbol
from quickvit.report.weights import principal_filters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that are told apart with any colour vision (Okabe and Ito), one per model.
COLOURS = {"ViT": "#6E6E6E", "h8": "#0072B2", "i8": "#D55E00"}
TINTS = {"ViT": "#C9C9C9", "h8": "#9CCAE6", "i8": "#F4BE98"}
INK, PALE, FAINT = "#222222", "#707070", "#D9D9D9"
DIVERGING, SEQUENTIAL, PAPER = "RdBu_r", "Blues", "gray_r"
POSITIVE, NEGATIVE = "#B2182B", "#2166AC"
STYLE: dict[Any, Any] = {
    "font.size": 9.5,
    "text.color": INK,
    "axes.edgecolor": "#A8A8A8",
    "axes.labelcolor": PALE,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": PALE,
    "ytick.color": PALE,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
# A digit that no rotation or mirroring turns into another one.
SHOWN_DIGIT = 4
SHOWN_FILTERS = 3
# Heights of the models' answers within their row.
ANSWER_ROWS = (0.82, 0.5, 0.18)


def draw_demo(
    results: Mapping[str, Any], models: Mapping[str, nn.Module], images: Tensor, labels: Tensor, path: Path
) -> None:
    """Draw the results of the demonstration and what goes on inside its models, and save the picture.

    images [N, 1, H, W] and labels [N] are the upright test digits.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    with style.context(["default", STYLE]):
        figure = Figure(figsize=(14, 11.6), facecolor="white")
        figure.text(0.035, 0.965, "A ViT, an h8 and an i8 on handwritten digits", size=18, weight="bold")
        number = results["images"]["train"]
        subtitle = f"one size, one recipe, one seed; {number:,} upright digits to train on"
        figure.text(0.035, 0.942, subtitle, size=11.5, color=PALE)
        _draw_curves(figure, results["curves"])
        _draw_accuracies(figure, results["rows"])
        _draw_confusion(figure, results)
        _draw_poses(figure, models, images, labels)
        _draw_filters(figure, models["h8"], images)
        # A figure made without pyplot draws on the Agg canvas, whatever the user's backend.
        figure.savefig(path, dpi=150)


# ---------------------------------------------------------------------- results


def _draw_curves(figure: Figure, curves: Mapping[str, Sequence[float]]) -> None:
    """Test accuracy after each epoch."""
    from matplotlib.ticker import MaxNLocator

    axes = figure.add_axes((0.085, 0.6, 0.27, 0.25))
    _title(figure, (0.085, 0.885), "a", "Learning", "accuracy on upright test digits")
    epochs = range(1, 1 + max(map(len, curves.values())))
    for name, curve in curves.items():
        percent = [100 * value for value in curve]
        axes.plot(epochs, percent, "o-", ms=3.5, color=COLOURS[name], lw=2, label=name, clip_on=False)
    axes.set(xlim=(1, max(2, len(epochs))), ylim=(0, 100), yticks=range(0, 101, 25), xlabel="epoch")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter("{x:.0f} %")
    axes.grid(axis="y", color=FAINT, lw=0.7)
    axes.legend(
        loc="lower right", frameon=False, labelcolor="linecolor", handlelength=1.4, prop={"weight": "bold"}
    )


def _draw_accuracies(figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    """Accuracy upright and transformed, with the size of each model."""
    subtitle = "dark: upright; light: rotated or mirrored at random"
    axes = figure.add_axes((0.42, 0.6, 0.25, 0.25))
    _title(figure, (0.42, 0.885), "b", "Turning the test digits", subtitle)
    for i, row in enumerate(rows):
        name = row["model"]
        bars = ((-0.2, "upright", COLOURS, "white"), (0.2, "transformed", TINTS, INK))
        for offset, key, colours, ink in bars:
            value = 100 * row[f"accuracy_{key}"]
            axes.bar(i + offset, value, width=0.38, color=colours[name])
            axes.text(i + offset, value - 2, f"{value:.1f}", ha="center", va="top", size=10, color=ink)
        size = f"{row['parameters'] / 1e6:.2f} M weights\n{row['macs'] / 1e6:.1f} M MACs"
        axes.text(i, -4, name, ha="center", va="top", size=11, weight="bold", color=COLOURS[name])
        axes.text(i, -12, size, ha="center", va="top", size=8, color=PALE, linespacing=1.4)
    axes.set(xticks=[], ylim=(0, 100), yticks=range(0, 101, 25))
    axes.yaxis.set_major_formatter("{x:.0f} %")
    axes.grid(axis="y", color=FAINT, lw=0.7)
    axes.set_axisbelow(True)


def _draw_confusion(figure: Figure, results: Mapping[str, Any]) -> None:
    """What the invariant model takes each digit for."""
    from matplotlib.colors import PowerNorm
    from matplotlib.patches import Rectangle

    subtitle = "row: the digit; column: the answer, in % of the row"
    axes = figure.add_axes((0.735, 0.575, 0.24, 0.29))
    _title(figure, (0.735, 0.885), "c", "What i8 takes for what", subtitle)
    table = torch.tensor(results["confusion_upright"]["i8"], dtype=torch.float64)
    percent = 100 * table / table.sum(1, keepdim=True).clamp(min=1)
    # The square root makes a single mistake visible beside a full diagonal.
    axes.imshow(percent.numpy(), cmap=SEQUENTIAL, norm=PowerNorm(0.5, 0, 100))
    for i, row in enumerate(percent.tolist()):
        for j, value in enumerate(row):
            if value >= 0.5:
                colour = "white" if value > 40 else INK
                axes.text(j, i, f"{value:.0f}", ha="center", va="center", size=7.5, color=colour)
    for a, b in (entry["pair"] for entry in results["lookalikes"]):
        for x, y in ((a, b), (b, a)):
            axes.add_patch(
                Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, ec=COLOURS["i8"], lw=1.4, clip_on=False)
            )
    axes.set(xticks=range(len(table)), yticks=range(len(table)))
    axes.set_xlabel("outlined: digits that turn or mirror into each other", size=8.5)
    axes.spines[:].set_visible(False)


# ---------------------------------------------------------------------- inside the models


def _draw_poses(figure: Figure, models: Mapping[str, nn.Module], images: Tensor, labels: Tensor) -> None:
    """One digit in its eight poses: the features of i8 before they become invariant, and all answers."""
    image, label = _example(models, images, labels)
    poses = torch.stack([act_on_image(image, g) for g in D8.elements])
    model = models["i8"]
    assert isinstance(model, QuickVisionTransformer)
    with torch.no_grad():
        steerable = model.forward_steerable(poses)
        answers = {name: m(poses).argmax(-1).tolist() for name, m in models.items()}
    patches = steerable.tokens[:, steerable.prefix :]
    layout = Layout(model.embed_dim, model.group)
    signs, directions = _shown_channels(layout, patches.mean(1))
    invariant = patches[..., layout.invariant]
    shown = invariant[0].std(0).argmax()
    maps = invariant[..., shown].unflatten(1, steerable.grid)

    heights = (1, 1, 0.8, 1, 1.05)
    place: dict[str, Any] = {"left": 0.135, "right": 0.67, "top": 0.445, "bottom": 0.035}
    grid = figure.add_gridspec(5, 8, height_ratios=heights, wspace=0.18, hspace=0.14, **place)
    rows = [[figure.add_subplot(grid[i, j]) for j in range(8)] for i in range(5)]
    for column, g in enumerate(D8.elements):
        top, middle, bars, circle, bottom = (row[column] for row in rows)
        top.set_title(symbol(g), size=11, style="italic", pad=5)
        top.imshow(poses[column, 0].numpy(), cmap=PAPER)
        middle.imshow(maps[column].numpy(), cmap=DIVERGING, vmin=-maps.abs().max(), vmax=maps.abs().max())
        _draw_signs(bars, signs[column])
        _draw_arrows(circle, directions[column])
        _draw_answers(bottom, {name: answer[column] for name, answer in answers.items()}, label)
        for axes in (top, middle, bars, circle, bottom):
            axes.set(xticks=[], yticks=[])
    subtitle = "r turns by 90° anti-clockwise, s mirrors; the octic features of i8 follow, its answer stays"
    _title(figure, (0.135, 0.485), "d", "One digit in its eight poses", subtitle)
    mean = ("mean token:\nsigns in A1 … B2", "mean token:\ntwo directions in E")
    for row, text in zip(rows, ("image", "an A1 channel\non the patches", *mean), strict=False):
        _label(row[0], text)
    offset: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    for name, y in zip(models, ANSWER_ROWS, strict=True):
        style: dict[str, Any] = {"ha": "right", "va": "center", "weight": "bold", "color": COLOURS[name]}
        rows[4][0].annotate(name, (0, y), (-14, 0), **offset, **style)


def _example(models: Mapping[str, nn.Module], images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The test image of the shown digit that the models together are surest of upright, and its label."""
    with torch.no_grad():
        scores = sum(model(images).log_softmax(-1)[:, SHOWN_DIGIT] for model in models.values())
    index = int(torch.where(labels == SHOWN_DIGIT, scores, -torch.inf).argmax())
    return images[index], int(labels[index])


def _shown_channels(layout: Layout, x: Tensor) -> tuple[Tensor, Tensor]:
    """The signs [P, 4] of A1 to B2 and two directions [P, 2, 2] in E, from features x [P, C].

    Shown are the largest channel of each, and for E also the pair that reaches farthest across the largest one.
    """
    signs = []
    for block in (b for b in layout.blocks if b.irrep.dim == 1):
        part = x[:, block.slice]
        signs.append(part[:, part[0].abs().argmax()].sign())
    pairs = torch.stack([x[:, b.slice] for b in layout.blocks if b.irrep.dim == 2], dim=-1)
    first = int(pairs[0].norm(dim=-1).argmax())
    across = pairs[0] @ pairs[0, first].flip(0).mul(torch.tensor([1.0, -1.0]))
    shown = pairs[:, [first, int(across.abs().argmax())]]
    return torch.stack(signs, dim=-1), nn.functional.normalize(shown, dim=-1)


def _draw_signs(axes: Axes, signs: Tensor) -> None:
    """A bar up or down for each one-dimensional irrep."""
    values = signs.tolist()
    axes.axhline(0, color="#A8A8A8", lw=0.8)
    axes.bar(range(4), values, width=0.62, color=[POSITIVE if v > 0 else NEGATIVE for v in values])
    for x, (value, irrep) in enumerate(zip(values, D8.irreps, strict=False)):
        y, side = (-0.12, "top") if value > 0 else (0.12, "bottom")
        axes.text(x, y, irrep.name, ha="center", va=side, size=6.5, color=PALE)
    axes.set(xlim=(-0.7, 3.7), ylim=(-1.2, 1.2))
    axes.spines[:].set_visible(False)


def _draw_arrows(axes: Axes, directions: Tensor) -> None:
    """Each pair of E as an arrow: E turns and mirrors as the image does."""
    from matplotlib.patches import Circle

    axes.add_patch(Circle((0, 0), 1, fill=False, color=FAINT))
    for (x, y), colour in zip(directions.tolist(), (INK, "#009E73"), strict=True):
        head = "-|>,head_length=.35,head_width=.18"
        arrow = {"arrowstyle": head, "color": colour, "lw": 1.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate("", (x, y), (0, 0), arrowprops=arrow)
    axes.set(xlim=(-1.12, 1.12), ylim=(-1.12, 1.12), aspect="equal")
    axes.spines[:].set_visible(False)


def _draw_answers(axes: Axes, answers: Mapping[str, int], label: int) -> None:
    """The answers of the models, with a mark where they are right."""
    axes.set(xlim=(0, 1), ylim=(0, 1))
    for (name, answer), y in zip(answers.items(), ANSWER_ROWS, strict=True):
        right = answer == label
        fill, edge, ink = (COLOURS[name], COLOURS[name], "white") if right else ("white", FAINT, PALE)
        style: dict[str, Any] = {"size": 11, "weight": "bold" if right else "normal", "color": ink}
        circle = {"boxstyle": "circle,pad=0.25", "fc": fill, "ec": edge}
        axes.text(0.5, y, str(answer), ha="center", va="center", bbox=circle, **style)
    axes.spines[:].set_visible(False)


def _draw_filters(figure: Figure, model: nn.Module, images: Tensor) -> None:
    """What the patch filters of each irrep respond to most."""
    assert isinstance(model, QuickVisionTransformer)
    _title(figure, (0.785, 0.485), "e", "Patch filters of h8", "what each irrep responds to most")
    rows = principal_filters(model, images, SHOWN_FILTERS)
    grid = figure.add_gridspec(
        len(rows), SHOWN_FILTERS, left=0.785, right=0.96, top=0.455, bottom=0.035, wspace=0.1, hspace=0.1
    )
    notes = ("r +   s +", "r +   s −", "r −   s +", "r −   s −", "r → E₂   s −", "r → −E₁   s +")
    for i, ((name, filters), note) in enumerate(zip(rows.items(), notes, strict=True)):
        for j, values in enumerate(filters):
            axes = figure.add_subplot(grid[i, j])
            limit = values.abs().max().item()
            axes.imshow(values[0].numpy(), cmap=DIVERGING, vmin=-limit, vmax=limit)
            axes.set(xticks=[], yticks=[])
            axes.spines[:].set_visible(False)
            if j == 0:
                _label(axes, note, name)


# ---------------------------------------------------------------------- words


def _title(figure: Figure, place: tuple[float, float], letter: str, title: str, subtitle: str) -> None:
    """A panel's letter, title and subtitle, from `place` upwards."""
    x, y = place
    figure.text(x - 0.02, y + 0.018, letter, size=13, weight="bold", color=PALE)
    figure.text(x, y + 0.018, title, size=13, weight="bold")
    figure.text(x, y, subtitle, size=9.5, color=PALE)


def _label(axes: Axes, text: str, name: str = "") -> None:
    """What a row of small pictures shows, to its left."""
    place: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points", "ha": "right"}
    if name:
        axes.annotate(name, (0, 0.5), (-10, 2), size=11, weight="bold", va="bottom", **place)
    y, side = (-2, "top") if name else (0, "center")
    axes.annotate(text, (0, 0.5), (-10, y), size=8.5, color=PALE, va=side, **place)
