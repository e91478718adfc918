"""The picture of the demonstration: curves, accuracies, confusions, the octic action and the steerable filters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    pass

# Colours that are told apart with any colour vision (Okabe and Ito), one per model.
COLOURS = {"ViT": "#7F7F7F", "h8": "#0072B2", "i8": "#D55E00"}
INK, PALE = "#262626", "#767676"
DIVERGING, SEQUENTIAL, PAPER = "RdBu_r", "Blues", "gray_r"
STYLE = {
    "font.size": 9,
    "text.color": INK,
    "axes.edgecolor": "#A0A0A0",
    "axes.labelcolor": INK,
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
# How r and s change each irrep.
BEHAVIOUR = {"A1": "r +   s +", "A2": "r +   s −", "B1": "r −   s +", "B2": "r −   s −"}
POSE_NAMES = {"e": "e", "r": "r", "r2": "r²", "r3": "r³", "s": "s", "sr": "sr", "sr2": "sr²", "sr3": "sr³"}


def draw_demo(
    results: Mapping[str, Any], models: Mapping[str, nn.Module], images: Tensor, labels: Tensor, path: Path
) -> None:
    """Draw the demonstration's results and what is inside its models, and save the picture.

    `images` [N, 1, H, W] and `labels` [N] are the test digits.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(14, 11.2), facecolor="white")
        FigureCanvasAgg(figure)
        figure.text(
            0.035, 0.972, "Three small vision transformers on handwritten digits", size=17, weight="bold"
        )
        subtitle = (
            f"One size, one recipe, one seed. Trained on {results['images']['train']:,} upright digits, "
            f"tested on {results['images']['test']:,} others."
        )
        figure.text(0.035, 0.948, subtitle, size=11, color=PALE)
        top = figure.add_gridspec(
            1, 3, left=0.06, right=0.965, top=0.86, bottom=0.57, width_ratios=(1.25, 1, 1.05), wspace=0.3
        )
        _curves(figure.add_subplot(top[0]), results["curves"])
        _bars(figure.add_subplot(top[1]), results["rows"])
        _confusion(figure.add_subplot(top[2]), results)
        _poses(figure, models, images, labels)
        _filters(figure, models["h8"])
        figure.savefig(path, dpi=150)
