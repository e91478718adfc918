"""Figures of results, as SVG without background, in colours that are read on white and on black."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import StringIO
from typing import Any

from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quickvit.group import D8
from quickvit.report import paper
from quickvit.report.formulas import block_flops
from quickvit.report.results import Results, Run
from quickvit.report.sample import Sample
from quickvit.report.table import one_line
from quickvit.report.tables.beside import family_name
from quickvit.report.tables.measures import top1
from quickvit.report.tables.studies import FAMILIES, natural, study_command

# One per family, of middle lightness, told apart with any colour vision.
COLOURS = {"vit": "#858585", "h2": "#B07CC6", "h8": "#2B8FD6", "i8": "#E0731D", "d8": "#22A377"}
OTHER = "#C2A21C"
# Of words and axes: replaced by that of the page where a figure is part of one.
INK, FAINT = "#777777", "#77777755"
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.titlesize": 10.5,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 2,
    "svg.fonttype": "none",
}
PANEL = (4.3, 3.3)
TOKENS = 197
WIDTHS = tuple(2**i for i in range(7, 14))
# Evaluations that are drawn as curves, the first that a run has.
CURVES = {"eval/top1": "top-1 (%)", "eval/20-NN/accuracy": "20-NN (%)"}
Panel = Callable[[Axes], None]


@dataclass(frozen=True)
class Drawing:
    """A figure of the report: an SVG for each panel, none if nothing was measured that it could show."""

    id: str
    title: str
    caption: str
    panels: tuple[str, ...]
    commands: tuple[str, ...] = ()

    @property
    def files(self) -> dict[str, str]:
        """The panels by the names of their files."""
        return {f"{self.id}-{i}": svg for i, svg in enumerate(self.panels, 1)}


def accuracy_flops(results: Results) -> Drawing:
    """Accuracy against FLOPs: the paper's classifiers and ours."""
    panels: list[Panel] = [_draw_paper]
    for dataset in results.datasets("families"):
        points = {
            family: (gmacs.mean, accuracy)
            for family in FAMILIES
            if (accuracy := results.sample("families", dataset, family, top1))
            and (gmacs := results.sample("families", dataset, family, lambda run: run.gmacs))
        }
        if points:
            panels.append(partial(_draw_points, points=points, title=dataset))
    return Drawing(
        "accuracy-flops",
        "Accuracy against FLOPs",
        "On ImageNet-1K the paper's classifiers (tab:deit), elsewhere ours: mean and standard deviation over seeds. "
        "Up and to the left is better.",
        render("accuracy-flops", panels),
        () if len(panels) > 1 else (study_command("families"),),
    )


def flops_width(_: Results) -> Drawing:
    """How many times fewer FLOPs an octic block needs, against the width."""

    def draw(axes: Axes) -> None:
        pairs = [(block_flops(w, TOKENS, octic=False), block_flops(w, TOKENS, octic=True)) for w in WIDTHS]
        axes.axhline(D8.flop_reduction, color=INK, lw=1, ls=(0, (4, 3)))
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

    return Drawing(
        "flops-width",
        "FLOPs of a block against its width",
        f"A standard block over an octic one, by formula, {TOKENS} tokens (the paper's fig:flops-ratio).",
        render("flops-width", [draw]),
    )


def accuracy_depth(results: Results) -> Drawing:
    """Accuracy against the number of octic blocks."""
    panels: list[Panel] = []
    for dataset in results.datasets("depth"):
        points = {
            int(match[1]): sample
            for name in sorted({run.name for run in results.study("depth", dataset)}, key=natural)
            if (match := re.fullmatch(r"k=(\d{1,4})", name))
            and (sample := results.sample("depth", dataset, name, top1))
        }
        if points:
            panels.append(partial(_draw_depth, points=points, title=dataset))
    return Drawing(
        "accuracy-depth",
        "Accuracy against the number of octic blocks",
        "The first k blocks of an h8 are octic; mean and standard deviation over seeds (the paper's "
        "fig:hybridisation_ablation).",
        render("accuracy-depth", panels),
        () if panels else (study_command("depth"),),
    )


def curves(results: Results) -> Drawing:
    """Training progression."""
    panels: list[Panel] = []
    for study in ("families", "dinov2"):
        for dataset in results.datasets(study):
            runs = results.study(study, dataset)
            key = next(
                (key for key in CURVES if any(key in found for run in runs for _, found in run.curve)), None
            )
            if key is not None:
                title = dataset if study == "families" else f"{dataset}, {study}"
                panels.append(partial(_draw_curves, runs=runs, key=key, title=title))
    return Drawing(
        "curves",
        "Training progression",
        "Mean over seeds, and the range that they cover (the paper's fig:dinov2).",
        render("curves", panels),
        () if panels else (study_command("families"),),
    )


FIGURES = (accuracy_flops, flops_width, accuracy_depth, curves)


# ---------------------------------------------------------------------- panels


def _draw_paper(axes: Axes) -> None:
    for model in (paper.L16, paper.H14):
        rows = {family: row for (name, family), row in paper.DEIT.rows.items() if name == model}
        for family, row in rows.items():
            axes.plot(
                row["gmacs"], row["top1"], "o" if model == paper.L16 else "s", color=COLOURS[family], ms=8
            )
            label = f"{family_name(family)} {'L' if model == paper.L16 else 'H'}"
            _mark(axes, label, (row["gmacs"], row["top1"]), left=family in ("h8", "i8"))
    axes.set(title="ImageNet-1K (paper)", xlabel="GMACs", ylabel="top-1 (%)")
    axes.margins(0.18)


def _draw_points(axes: Axes, points: Mapping[str, tuple[float, Sample]], title: str) -> None:
    for family, (gmacs, accuracy) in points.items():
        axes.errorbar(
            gmacs, accuracy.mean, yerr=accuracy.spread or 0, fmt="o", ms=8, capsize=3, color=COLOURS[family]
        )
        _mark(axes, family_name(family), (gmacs, accuracy.mean), left=family == "h8")
    axes.set(title=_words(title), xlabel="GMACs", ylabel="top-1 (%)")
    axes.margins(0.18)


def _draw_depth(axes: Axes, points: Mapping[int, Sample], title: str) -> None:
    means, spreads = [s.mean for s in points.values()], [s.spread or 0 for s in points.values()]
    axes.errorbar(list(points), means, yerr=spreads, fmt="o-", ms=7, capsize=3, color=COLOURS["h8"])
    axes.set(title=_words(title), xlabel="octic blocks k", ylabel="top-1 (%)", xticks=list(points))


def _draw_curves(axes: Axes, runs: Sequence[Run], key: str, title: str) -> None:
    names = {run.name for run in runs}
    for name in [*(f for f in FAMILIES if f in names), *sorted(names - set(FAMILIES))]:
        by_step: dict[float, list[float]] = defaultdict(list)
        for run in runs:
            for step, found in run.curve:
                if run.name == name and key in found:
                    by_step[step].append(found[key])
        steps = sorted(by_step)
        colour = COLOURS.get(name, OTHER)
        axes.plot(
            steps,
            [Sample(tuple(by_step[s])).mean for s in steps],
            color=colour,
            label=_words(family_name(name)),
        )
        low, high = ([bound(by_step[s]) for s in steps] for bound in (min, max))
        axes.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0)
    axes.set(title=_words(title), xlabel="updates", ylabel=CURVES[key])
    axes.legend(loc="lower right")


def _mark(axes: Axes, text: str, point: tuple[float, float], *, left: bool) -> None:
    offset, side = ((-7, 5), "right") if left else ((7, 5), "left")
    axes.annotate(text, point, offset, textcoords="offset points", size=9, ha=side)


def _words(text: str) -> str:
    """Text that matplotlib does not take for mathematics, nor a legend for hidden."""
    return one_line(text).replace("$", r"\$").lstrip("_")


# ---------------------------------------------------------------------- SVG


def render(name: str, panels: Sequence[Panel]) -> tuple[str, ...]:
    """Each panel as SVG, the same bytes every time."""
    # The date and the version of the program would change what is the same figure.
    nothing: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    drawn = []
    with style.context(["default", {**STYLE, "svg.hashsalt": name}]):
        for draw in panels:
            figure = Figure(figsize=PANEL, layout="constrained")
            draw(figure.add_subplot())
            file = StringIO()
            figure.savefig(file, format="svg", transparent=True, metadata=nothing)
            drawn.append(file.getvalue())
    return tuple(drawn)


def inline(name: str, svg: str) -> str:
    """An SVG for a page: no prologue, names of its own, the page's ink, as wide as there is room."""
    svg = re.sub(r"<(metadata|style).*?</\1>\s*", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'(id="|url\(#|href="#)', rf"\1{name}-", svg)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    return svg.replace(INK, "var(--muted)")
