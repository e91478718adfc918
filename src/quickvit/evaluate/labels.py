"""The classes of data and those of a model, brought together by their names."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch import nn

from quickvit.models.declared import LABELS, declared, unwrapped

logger = logging.getLogger(__name__)
# Names that an error lists.
LISTED = 5


def class_names(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's classes; none where it says none, or not as many as it has answers."""
    names = tuple(declared(model).get(LABELS) or ())
    return names if len(names) == getattr(unwrapped(model), "num_classes", None) else ()


def class_numbers(model: nn.Module, classes: Sequence[str], data: str) -> list[int]:
    """For each class of some data the number that a model has for it.

    Data has its classes in the order of their names, may have fewer than the model, and must write them alike. Where
    a model says no names, or others throughout (words and not synsets, say), the order is taken to be the same.
    """
    names = class_names(model)
    unknown = [name for name in classes if name not in names]
    if len(unknown) == len(classes):
        if names:
            if len(names) != len(classes):
                raise ValueError(
                    f"the model tells {len(names)} classes apart, {_listed(names)}; {data} has {len(classes)} "
                    f"others, {_listed(classes)}"
                )
            logger.warning(
                "%s names none of the model's classes: it is taken to have them in their order", data
            )
        return list(range(len(classes)))
    if unknown:
        raise ValueError(
            f"the model was not trained on the classes {_listed(unknown)} of {data}; it knows {_listed(names)}"
        )
    return [names.index(name) for name in classes]


def _listed(names: Sequence[str]) -> str:
    rest = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(map(repr, names[:LISTED])) + rest
