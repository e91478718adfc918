"""Figures as SVG for pages: the same bytes from the same numbers, in the colours of the page that they stand on."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# matplotlib knows no variables, so figures are drawn with stand-ins for the colours of the page.
INK, MUTED, LINE, ACCENT, ACCENT_2 = "#010203", "#010204", "#010205", "#010206", "#010207"
# Without a page: colours that can be read on light and on dark.
VARIABLES = {
    INK: "var(--ink, #7a7a7a)",
    MUTED: "var(--muted, #8a8a8a)",
    LINE: "var(--line, #9a9a9a)",
    ACCENT: "var(--accent, #d55e00)",
    ACCENT_2: "var(--accent-2, #1f83c4)",
}
STYLE: dict[Any, Any] = {
    "font.size": 10,
    "svg.fonttype": "none",
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "text.color": INK,
    "axes.edgecolor": LINE,
    "axes.labelcolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}


@contextmanager
def drawing(width: float, height: float) -> Iterator[Figure]:
    """An empty figure of so many inches, to be drawn and written within."""
    try:
        from matplotlib import style
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        message = 'figures need matplotlib: pip install "quickvit[report]"'
        raise ModuleNotFoundError(message, name=error.name) from error
    with style.context(["default", STYLE]):
        yield Figure(figsize=(width, height))


def to_svg(figure: Figure, label: str) -> str:
    """A figure as an SVG element for a page; `label` says to readers who do not see it what it shows."""
    from matplotlib import rc_context

    file = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with rc_context({"svg.hashsalt": label}):
        figure.savefig(file, format="svg", metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].strip()
    # A rule for all elements would leave the figure and hold for the whole page.
    text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    text = re.sub(r' id="([^"]*)"', lambda found: found[0] if found[1] in used else "", text)
    # Hundredths of a point cannot be told apart, and hundreds of arrows have many of them.
    text = re.sub(r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), text)
    for stand_in, variable in VARIABLES.items():
        text = text.replace(stand_in, variable)
    width, height = figure.get_size_inches()
    return re.sub(
        r"<svg[^>]*>",
        f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" role="img" '
        f'viewBox="0 0 {72 * width:g} {72 * height:g}" aria-label="{escape(label)}" '
        f'style="width: 100%; max-width: {96 * width:g}px; height: auto; stroke-linejoin: round">',
        text,
        count=1,
    )
