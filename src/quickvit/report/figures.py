"""Figures of results, in colours that are read on white and on black."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from quickvit.group import D8
from quickvit.report import paper
from quickvit.report.formulas import block_flops
from quickvit.report.results import QUARTER, UPRIGHT, Results, Run
from quickvit.report.sample import Sample
from quickvit.report.svg import LINE, MUTED, Drawing, canvas, to_svg
from quickvit.report.table import one_line
from quickvit.report.tables.beside import family_name
from quickvit.report.tables.frozen import STUDY
from quickvit.report.tables.measures import top1
from quickvit.report.tables.studies import FAMILIES, natural, study_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# One per family, of middle lightness, told apart with any colour vision.
COLOURS = {"vit": "#858585", "h2": "#B07CC6", "h8": "#2B8FD6", "i8": "#E0731D", "d8": "#22A377"}
OTHER = "#C2A21C"
PLOT: dict[str, Any] = {
    "text.color": MUTED,
    "axes.titlecolor": MUTED,
    "axes.titlesize": 10.5,
    "axes.edgecolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": LINE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "lines.linewidth": 2,
}
PANEL = (4.3, 3.3)
TOKENS = 197
WIDTHS = tuple(2**i for i in range(7, 14))
# The classifiers of frozen features whose course is shown, as in the paper.
SHOWN = ("logistic", "20-NN")
Panel = Callable[["Axes"], None]
# After so many updates; the points of one run, with the run's name.
Point = tuple[float, float]
Curve = tuple[str, Sequence[Point]]


def accuracy_flops(results: Results) -> Drawing:
    """Accuracy against FLOPs: the paper's classifiers and ours."""
    panels: dict[str, Panel] = {"ImageNet-1K (paper)": _draw_paper}
    for dataset in results.datasets("families"):
        points = {
            family: (gmacs.mean, accuracy)
            for family in FAMILIES
            if (accuracy := results.sample("families", dataset, family, top1))
            and (gmacs := results.sample("families", dataset, family, lambda run: run.gmacs))
        }
        if points:
            panels[dataset] = partial(_draw_points, points=points)
    return _plot(
        "accuracy-flops",
        "Accuracy against FLOPs",
        "On ImageNet-1K the paper's classifiers (tab:deit), elsewhere ours: mean and standard deviation over seeds. "
        "Up and to the left is better (the paper's fig:computational_savings).",
        panels,
        () if len(panels) > 1 else (study_command("families"),),
    )


def flops_width(_: Results) -> Drawing:
    """How many times fewer FLOPs an octic block needs, against the width."""

    def draw(axes: Axes) -> None:
        pairs = [(block_flops(w, TOKENS, octic=False), block_flops(w, TOKENS, octic=True)) for w in WIDTHS]
        axes.axhline(D8.flop_reduction, color=MUTED, lw=1, ls=(0, (4, 3)))
        axes.annotate(
            "a linear layer: 16/3", (WIDTHS[0], D8.flop_reduction), (0, 4), textcoords="offset points"
        )
        products = [a.products / b.products for a, b in pairs]
        everything = [a.total / b.total for a, b in pairs]
        axes.plot(WIDTHS, products, "o-", color=COLOURS["h8"], label="matrix products")
        axes.plot(WIDTHS, everything, "o-", color=COLOURS["i8"], label="all operations")
        axes.set_xscale("log", base=2)
        axes.set_xticks(WIDTHS, [str(w) for w in WIDTHS])
        axes.minorticks_off()
        axes.set(xlabel="width C", ylabel="fewer FLOPs (×)", ylim=(0, 6))
        axes.legend(loc="lower right")

    return _plot(
        "flops-width",
        "FLOPs of a block against its width",
        f"A standard block over an octic one, by formula, {TOKENS} tokens (the paper's fig:flops-ratio).",
        {"": draw},
    )


def accuracy_depth(results: Results) -> Drawing:
    """Accuracy against the number of octic blocks."""
    panels: dict[str, Panel] = {}
    for dataset in results.datasets("depth"):
        points = {
            int(match[1]): sample
            for name in sorted({run.name for run in results.study("depth", dataset)}, key=natural)
            if (match := re.fullmatch(r"k=(\d{1,4})", name))
            and (sample := results.sample("depth", dataset, name, top1))
        }
        if len(points) > 1:
            panels[dataset] = partial(_draw_depth, points=points)
    return _plot(
        "accuracy-depth",
        "Accuracy against the number of octic blocks",
        "The first k blocks of an h8 are octic; mean and standard deviation over seeds (the paper's "
        "fig:hybridisation_ablation).",
        panels,
        () if panels else (study_command("depth"),),
    )


def curves(results: Results) -> Drawing:
    """Training progression."""
    panels: dict[str, Panel] = {}
    for dataset in results.datasets("families"):
        curves = [(run.name, _points(run.curve, "eval/top1")) for run in results.study("families", dataset)]
        if any(points for _, points in curves):
            panels[dataset] = partial(_draw_curves, solid=curves, label="top-1 (%)")
    for dataset in results.datasets(STUDY):
        runs = [run for run in results.study(STUDY, dataset) if run.progress]
        for classifier in SHOWN:
            upright, turned = (
                [(run.name, _progress(run, classifier, pose)) for run in runs] for pose in (UPRIGHT, QUARTER)
            )
            if any(points for _, points in upright):
                label = f"{classifier} (%), dashed: turned by 90°s"
                draw = partial(_draw_curves, solid=upright, label=label, dashed=turned)
                panels[f"{dataset}, {STUDY}, {classifier}"] = draw
    return _plot(
        "curves",
        "Training progression",
        "Mean over seeds, and the range that they cover (the paper's fig:dinov2).",
        panels,
        () if panels else (study_command("families"),),
    )


FIGURES = (accuracy_flops, flops_width, accuracy_depth, curves)


# ---------------------------------------------------------------------- panels


def _plot(
    name: str, title: str, caption: str, panels: Mapping[str, Panel], commands: tuple[str, ...] = ()
) -> Drawing:
    """A figure of panels by their titles."""
    drawn = []
    for words, draw in panels.items():
        with canvas(*PANEL, PLOT) as figure:
            figure.set_layout_engine("constrained")
            axes = figure.add_subplot(title=_words(words))
            draw(axes)
            drawn.append(to_svg(figure, f"{title}: {words}" if words else title))
    return Drawing(name, title, caption, tuple(drawn), commands)


def _draw_paper(axes: Axes) -> None:
    for model in (paper.L16, paper.H14):
        rows = {family: row for (name, family), row in paper.DEIT.rows.items() if name == model}
        for family, row in rows.items():
            axes.plot(
                row["gmacs"], row["top1"], "o" if model == paper.L16 else "s", color=COLOURS[family], ms=8
            )
            label = f"{family_name(family)} {'L' if model == paper.L16 else 'H'}"
            _mark(axes, label, (row["gmacs"], row["top1"]), left=family in ("h8", "i8"))
    axes.set(xlabel="GMACs", ylabel="top-1 (%)")
    axes.margins(0.18)


def _draw_points(axes: Axes, points: Mapping[str, tuple[float, Sample]]) -> None:
    for family, (gmacs, accuracy) in points.items():
        axes.errorbar(
            gmacs, accuracy.mean, yerr=accuracy.spread or 0, fmt="o", ms=8, capsize=3, color=COLOURS[family]
        )
        _mark(axes, family_name(family), (gmacs, accuracy.mean), left=family == "h8")
    axes.set(xlabel="GMACs", ylabel="top-1 (%)")
    axes.margins(0.18)


def _draw_depth(axes: Axes, points: Mapping[int, Sample]) -> None:
    means, spreads = [s.mean for s in points.values()], [s.spread or 0 for s in points.values()]
    axes.errorbar(list(points), means, yerr=spreads, fmt="o-", ms=7, capsize=3, color=COLOURS["h8"])
    axes.set(xlabel="octic blocks k", ylabel="top-1 (%)", xticks=list(points))


def _points(curve: Iterable[tuple[float, Mapping[str, float]]], key: str) -> list[Point]:
    return [(step, found[key]) for step, found in curve if key in found]


def _progress(run: Run, classifier: str, pose: str) -> list[Point]:
    """Accuracy of a classifier after each number of updates."""
    found = ((step, run.answers(pose, step).get(classifier, {})) for step, _ in run.progress)
    return _points(found, "accuracy")


def _draw_curves(axes: Axes, solid: Sequence[Curve], label: str, dashed: Sequence[Curve] = ()) -> None:
    for curves, style in ((solid, "-"), (dashed, "--")):
        names = {name for name, _ in curves}
        for name in [*(f for f in FAMILIES if f in names), *sorted(names - set(FAMILIES))]:
            by_step: dict[float, list[float]] = defaultdict(list)
            for step, value in chain.from_iterable(points for other, points in curves if other == name):
                by_step[step].append(value)
            steps = sorted(by_step)
            means = [Sample(tuple(by_step[s])).mean for s in steps]
            colour = COLOURS.get(name, OTHER)
            words = _words(family_name(name)) if curves is solid else None
            axes.plot(steps, means, style, color=colour, label=words)
            low, high = ([bound(by_step[s]) for s in steps] for bound in (min, max))
            axes.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
    axes.set(xlabel="updates", ylabel=label)
    axes.legend(loc="lower right")


def _mark(axes: Axes, text: str, point: tuple[float, float], *, left: bool) -> None:
    offset, side = ((-7, 5), "right") if left else ((7, 5), "left")
    axes.annotate(text, point, offset, textcoords="offset points", size=9, ha=side)


def _words(text: str) -> str:
    """Text that matplotlib does not take for mathematics, nor a legend for hidden."""
    return one_line(text).replace("$", r"\$").lstrip("_")
