"""Draws the figures of the documentation: `python docs/figures.py` writes them to docs/figures.

What they show is computed by the library or read from benchmarks/. A test holds that the files are what this draws.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from quickvit import D8, Layout, act_on_image
from quickvit.group import Unfolding
from quickvit.group.layout import packed_fourier_matrix
from quickvit.layers import OcticLinear
from quickvit.models import FAMILIES
from quickvit.report import paper
from quickvit.report.exploration import symbol
from quickvit.report.weights import dense_weight
from quickvit.testing import randomize

FOLDER = Path(__file__).parent / "figures"
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
INK, PAPER, LINE = "#37474f", "#fafafa", "#b0bec5"
COLOURS = {"A1": "#b39ddb", "A2": "#f48fb1", "B1": "#ffcc80", "B2": "#dce775", "E": "#80cbc4"}
RED, BLUE = (198, 40, 40), (40, 53, 147)
STANDARD, INVARIANT = "#cfd8dc", COLOURS["A1"]
# The sub-tokens of the packed channels in the paper's names: E21 is the first component of the second copy of E.
BLOCKS = ("A1", "A2", "B1", "B2", "E11", "E21", "E12", "E22")


class Drawing:
    """An SVG on paper of its own, so that it can be read on a dark page too."""

    def __init__(self, width: int, height: int, description: str) -> None:
        self.head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
            f'font-family="sans-serif" font-size="13" text-anchor="middle" fill="{INK}">'
            f"<title>{description}</title>"
        )
        self.parts: list[str] = []
        self.rectangle(0, 0, width, height, PAPER, round=8)

    def rectangle(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        line: str = "",
        round: int = 0,
    ) -> None:
        """A filled rectangle."""
        more = (f' stroke="{line}"' if line else "") + (f' rx="{round}"' if round else "")
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{more}/>'
        )

    def text(self, x: float, y: float, text: str, anchor: str = "middle") -> None:
        """A line of text, its middle (or start, or end) at x and its foot at y."""
        self.parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{text}</text>')

    def arrow(self, x: float, y: float, length: float) -> None:
        """An arrow to the right."""
        end = x + length
        self.parts.append(
            f'<path d="M{x:g} {y:g}H{end - 5:g}M{end - 6:g} {y - 4:g}L{end:g} {y:g}L{end - 6:g} {y + 4:g}" '
            f'fill="none" stroke="{INK}" stroke-width="1.5"/>'
        )

    def cells(self, values: Tensor, x: float, y: float, size: float) -> None:
        """A matrix as coloured squares: negative blue, zero white, positive red."""
        rows, columns = values.shape
        values = values / values.abs().max()
        self.rectangle(x, y, columns * size, rows * size, "white", line=LINE)
        for i, row in enumerate(values.tolist()):
            for j, value in enumerate(row):
                if abs(value) > 1e-3:
                    self.rectangle(x + j * size, y + i * size, size, size, _colour(value))

    def write(self, folder: Path, name: str) -> None:
        """Write the file."""
        (folder / f"{name}.svg").write_text("\n".join([self.head, *self.parts, "</svg>\n"]), encoding="utf-8")


def poses() -> Drawing:
    """The eight poses of a letter."""
    letter = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0], [1, 1, 1, 0], [1, 0, 0, 0], [1, 0, 0, 0]])
    image = torch.nn.functional.pad(letter, (2, 1, 1, 1)).float()
    drawing = Drawing(640, 108, "The letter F in the eight poses of the octic group")
    for i, g in enumerate(D8.elements):
        drawing.cells(act_on_image(image, g), 12 + 78 * i, 12, 10)
        drawing.text(47 + 78 * i, 100, symbol(g))
    return drawing


def layout() -> Drawing:
    """Where each irrep lies in the channels."""
    drawing = Drawing(640, 84, "The channels of a steerable feature: A1, A2, B1, B2, then E twice")
    for block in Layout(64).blocks:
        name = block.irrep.name
        x, width = 20 + block.start / 64 * 600, block.width / 64 * 600
        drawing.rectangle(x, 30, width, 34, COLOURS[name], line=INK)
        parts = [name] if block.irrep.dim == 1 else [f"E1{block.component + 1}", f"E2{block.component + 1}"]
        for i, part in enumerate(parts):
            drawing.text(x + width * (i + 0.5) / len(parts), 52, part)
        drawing.text(x + width / 2, 22, "C/8" if block.irrep.dim == 1 else "C/4")
    return drawing


def fourier() -> Drawing:
    """The Fourier matrix."""
    drawing = Drawing(350, 286, "The Fourier matrix of D8")
    drawing.cells(packed_fourier_matrix(D8), 90, 34, 30)
    for i, (g, name) in enumerate(zip(D8.regular_order, BLOCKS, strict=True)):
        drawing.text(80, 54 + 30 * i, f"φ({symbol(g)})", "end")
        drawing.text(105 + 30 * i, 26, name)
    return drawing


def linear() -> Drawing:
    """The matrix of one equivariant map in both domains."""
    layer = randomize(OcticLinear(16, 16, bias=False))
    packed, spatial = dense_weight(layer), dense_weight(layer, regular=True)
    drawing = Drawing(
        640, 318, "The same map: full in the regular domain, block-diagonal in the Fourier domain"
    )
    for x, title, matrix in ((20, "regular", spatial), (348, "Fourier", packed)):
        drawing.text(x + 136, 26, f"{title} domain: {int((matrix.abs() > 1e-6).sum())} of 256 entries")
        drawing.cells(matrix, x, 36, 17)
    drawing.arrow(304, 172, 34)
    return drawing


def kernels() -> Drawing:
    """The kernels of the lift."""
    y, x = torch.meshgrid(torch.linspace(0, 3, 6), torch.linspace(0, 3, 6), indexing="ij")
    corner = torch.sin(1.3 * x) * torch.cos(0.8 * y + 0.4 * x)
    # One for each irrep, and for the second copy of E.
    corners = torch.stack([*5 * [corner], corner.T]).unsqueeze(1)
    drawing = Drawing(640, 112, "Kernels of the lift, unfolded by the symmetry of each irrep from a corner")
    for i, kernel in enumerate(Unfolding((12, 12))(corners)):
        drawing.cells(kernel, 10 + 78 * i, 12, 6)
        drawing.text(46 + 78 * i, 102, BLOCKS[i])
    return drawing


def families() -> Drawing:
    """What the families do with twelve blocks."""
    drawing = Drawing(640, 216, "The families: lift, octic blocks, invariant or not, standard blocks, head")
    for row, (name, family) in enumerate(FAMILIES.items()):
        y, octic = 24 + 40 * row, 12 if family.full_depth else 6
        drawing.text(36, y + 17, name)
        drawing.rectangle(60, y, 52, 24, COLOURS["E"], line=LINE, round=3)
        drawing.text(86, y + 17, "lift")
        x = 120.0
        for block in range(12):
            if block == octic:
                x = _leave(drawing, x, y, family.invariant)
            drawing.rectangle(x, y, 24, 24, COLOURS["E"] if block < octic else STANDARD, line=LINE, round=3)
            x += 28
        if octic == 12:
            x = _leave(drawing, x, y, family.invariant)
        drawing.rectangle(x, y, 52, 24, STANDARD, line=LINE, round=3)
        drawing.text(x + 26, y + 17, "head")
    for x, colour, name in (
        (120, COLOURS["E"], "steerable"),
        (240, INVARIANT, "invariant"),
        (360, STANDARD, "standard"),
    ):
        drawing.rectangle(x, 188, 14, 14, colour, line=LINE)
        drawing.text(x + 22, 200, name, "start")
    return drawing


def speed() -> Drawing:
    """How many times as fast as timm's ViT forward passes are on an H200, beside the paper's on an A100."""
    files = {"large": "model", "huge": "huge", "giant": "giant", "e": "giant", "22b": "22b"}
    drawing = Drawing(640, 280, "Speed-up of forward passes over timm's ViT")
    zero, unit, y = 132, 106, 14.0
    for size, file in files.items():
        rows = json.loads((BENCHMARKS / f"h200_{file}.json").read_text())["results"]
        name = next(row["case"] for row in rows if row["case"].lower().startswith(f"vit-{size}/"))
        ratios = {row["name"]: row["ratio"] for row in rows if row["case"] == name}
        shown = [family for family in ("d8", "h8") if family in ratios]
        drawing.text(
            zero - 12, y + 12 * len(shown) + 3, name.removeprefix("ViT-").removesuffix(" forward"), "end"
        )
        for family in shown:
            drawing.rectangle(
                zero, y, unit * ratios[family], 18, COLOURS["E" if family == "d8" else "A1"], round=2
            )
            drawing.text(zero + unit * ratios[family] + 8, y + 14, f"{ratios[family]:.2f}×", "start")
            if family == "d8":
                drawing.rectangle(zero + unit * paper.SCALING.rows[size]["speed"] - 1.5, y - 2, 3, 22, INK)
            y += 24
        y += 14
    drawing.rectangle(zero + unit - 0.5, 8, 1, y - 16, LINE)
    for x, width, fill, name in (
        (132, 14, COLOURS["E"], "d8"),
        (194, 14, COLOURS["A1"], "h8"),
        (256, 1, LINE, "timm's ViT"),
        (350, 3, INK, "the paper's d8, on an A100"),
    ):
        drawing.rectangle(x, y, width, 14, fill)
        drawing.text(x + width + 8, y + 12, name, "start")
    return drawing


def _leave(drawing: Drawing, x: float, y: float, invariant: bool) -> float:
    """Where the octic part ends: an invariant, or nothing at all."""
    if invariant:
        drawing.rectangle(x, y, 80, 24, INVARIANT, line=LINE, round=3)
        drawing.text(x + 40, y + 17, "invariant")
    else:
        drawing.arrow(x + 4, y + 12, 70)
    return x + 84


def _colour(value: float) -> str:
    """White to red for 0 to 1, white to blue for 0 to −1, in sixteen steps."""
    step, end = round(16 * abs(value)) / 16, RED if value > 0 else BLUE
    return "#" + "".join(f"{round(255 + step * (channel - 255)):02x}" for channel in end)


FIGURES = (poses, layout, fourier, linear, kernels, families, speed)


def main(folder: Path = FOLDER) -> None:
    """Write all figures."""
    for figure in FIGURES:
        figure().write(folder, figure.__name__)


if __name__ == "__main__":
    main()
