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


def kernels(name):
    """What benchmarks/kernels.py printed: microseconds of a block and beside blocks, by kernel and together."""
    lines = (BENCHMARKS / f"{name}.txt").read_text().splitlines()[1:]
    rows = (line.split(maxsplit=3) for line in lines)
    return {kernel: (float(block), float(beside)) for block, _, beside, kernel in rows}


def measured(name):
    """The record of this name."""
    return json.loads((BENCHMARKS / f"{name}.json").read_text())
