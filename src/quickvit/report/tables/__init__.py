"""The tables of the report: each a function of what was measured."""

from __future__ import annotations

from collections.abc import Callable

from quickvit.report.results import Results
from quickvit.report.table import Table
from quickvit.report.tables.computed import compute_scaling, dihedral_groups, paper_models
from quickvit.report.tables.frozen import frozen_features, hematology, progress
from quickvit.report.tables.protocols import image_labels, masks, turned_answers
from quickvit.report.tables.speed import (
    block_speed,
    forward_speed,
    gelu,
    linear_layers,
    memory,
    packing,
    training_speed,
)
from quickvit.report.tables.studies import (
    classification,
    depth,
    initialisation,
    invariants,
    lift,
    norm,
    recipe,
    slanted,
)

# By chapter, in the order of the page.
TABLES: dict[str, tuple[Callable[[Results], Table], ...]] = {
    "Compute": (compute_scaling, paper_models, dihedral_groups),
    "Speed and memory": (forward_speed, block_speed, memory, training_speed, packing, linear_layers, gelu),
    "Accuracy": (
        *(classification, recipe, slanted, frozen_features, hematology, progress),
        *(image_labels, masks, turned_answers),
    ),
    "Ablations": (invariants, lift, depth, initialisation, norm),
}

__all__ = ["TABLES"]
