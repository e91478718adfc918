"""What was measured, as it lies in benchmarks/."""

import json
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
# The records of whole models on a GPU that the pages have tables of.
WHOLE_MODELS = tuple(
    f"h200_{name}"
    for name in (
        "model",
        "huge",
        "giant",
        "22b",
        "train_large",
        "train_huge",
        "train_giant",
        "dinov2_large",
        "dinov2_huge",
    )
)


def measured(name):
    """The record of this name."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text())
