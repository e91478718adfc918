"""Recipes: each a complete, typed configuration, its modules and its losses."""

from collections.abc import Callable
from typing import Any, NamedTuple

from quickvit.recipes import deit3, dinobloom, dinov2
from quickvit.recipes.deit3 import Deit3, Deit3Config
from quickvit.recipes.dinobloom import Dinobloom, DinobloomConfig
from quickvit.recipes.dinov2 import Dinov2, Dinov2Config
from quickvit.train import Outcome, Recipe


class Entry(NamedTuple):
    """A recipe by its name: its configuration, how it is trained, and how it is rebuilt to be looked at."""

    config: type[Any]
    train: Callable[[Any, str], Outcome]
    rebuild: Callable[[Any], Recipe]


RECIPES: dict[str, Entry] = {
    "deit3": Entry(Deit3Config, deit3.train, Deit3.rebuild),
    "dinov2": Entry(Dinov2Config, dinov2.train, Dinov2.rebuild),
    "dinobloom": Entry(DinobloomConfig, dinobloom.train, Dinobloom.rebuild),
}
"""The recipes by their names, as in `quickvit train NAME`."""

__all__ = [
    "RECIPES",
    "Deit3",
    "Deit3Config",
    "Dinobloom",
    "DinobloomConfig",
    "Dinov2",
    "Dinov2Config",
    "Entry",
]
