"""Figures of what the symmetry does: to weights, and to what models make of an image."""

from __future__ import annotations

import torch

from quickvit.layers import OcticLinear
from quickvit.report.exploration import Exploration
from quickvit.report.pose_figure import draw_cayley, draw_predictions
from quickvit.report.results import Results
from quickvit.report.svg import Drawing
from quickvit.report.weight_figure import draw_blocks, draw_filters

EXPLORE = (
    "quickvit explore RUN_I8 --baseline RUN_VIT --data DATA --split test --save benchmarks/explorer/NAME.json",
)
# Of the layer whose weights are shown: wide enough to see that they are random.
WIDTH = 64


def blocks(_: Results) -> Drawing:
    """The weight of an octic linear layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layer = OcticLinear(WIDTH, WIDTH)
    return Drawing(
        "blocks",
        "The weight of an octic linear layer",
        f"The same linear map of {WIDTH} channels in two bases, before any training. In the regular basis it is "
        "full; in the Fourier basis there is a block for each irrep, and the two of E are one (the paper's "
        "fig:linear_layer).",
        (draw_blocks(layer),),
        wide=True,
    )


def filters(results: Results) -> Drawing:
    """The patch filters of a trained model."""
    found = results.exploration
    return Drawing(
        "filters",
        "Patch filters by irrep",
        "The first principal components of the patch filters of a trained "
        f"{found.answers[0].model if found else 'octic model'}, of what they respond to in the images below. Those "
        "of A1 do not change when they are turned or mirrored, those of A2, B1 and B2 at most change their sign, "
        "and those of E turn into each other (the paper's fig:filters-comparison).",
        (draw_filters(found.filters),) if found and found.filters else (),
        () if found and found.filters else EXPLORE,
        wide=True,
    )


def cayley(results: Results) -> Drawing:
    """The group, as what it does to an image and its features."""
    found = results.exploration
    return Drawing(
        "cayley",
        "The octic group",
        "Eight poses of an image, and what leads from one to the next. Below each the features of its patches after "
        "the octic blocks: a channel of A1 in colours, which moves with the image, and a pair of E as arrows, which "
        "turns with it too (the paper's fig:visualizations).",
        (draw_cayley(found, shown_image(found)),) if found else (),
        () if found else EXPLORE,
        wide=True,
    )


def predictions(results: Results) -> Drawing:
    """What two models say of the same image in eight poses."""
    found = results.exploration
    return Drawing(
        "predictions",
        "One image, eight answers",
        "What both models take the image for, and how sure they are. Shown is the first image of those below that "
        "the baseline answers differently when it is turned, if there is one.",
        (draw_predictions(found, shown_image(found)),) if found else (),
        () if found else EXPLORE,
        wide=True,
    )


def shown_image(exploration: Exploration) -> int:
    """The first image whose answer by the baseline depends on the pose; the first one where there is none."""
    return int(exploration.answers[1].changing.int().argmax())


SYMMETRY = (blocks, filters, cayley, predictions)
