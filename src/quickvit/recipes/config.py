"""Configurations: tables of defaults, values that are filled in, and what is kept of them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

T = TypeVar("T")
# The least that is more than nothing, for limits.
ABOVE_0 = math.ulp(0.0)


def row(table: Mapping[int, T], width: int) -> T:
    """The row of a table that holds for a width."""
    return table[max(least for least in table if least <= width)]


def given(value: T | None) -> T:
    """A value that is filled in by now."""
    if value is None:
        raise ValueError("the configuration has open values; call resolve() first")
    return value


def end_of_rate(asked: float | None, default: float, peak: float) -> float:
    """Where a learning rate ends that falls from its peak: as asked, or at the default unless the peak is lower."""
    if asked is not None and asked > peak:
        raise ValueError(
            f"final_learning_rate must be at most the learning rate of {peak:g}, got {asked:g}; lower it, or leave "
            "it out"
        )
    return min(default, peak) if asked is None else asked


def as_plain(config: Any) -> dict[str, Any]:
    """A configuration as JSON knows it."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config), default=str))
    return plain


def require_clip(clip: float | None) -> None:
    """Refuse a norm that no gradient has."""
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be above 0, or null for no clipping, got {clip}")


def require_within(values: Mapping[str, Any], limits: Mapping[str, tuple[float, float]]) -> None:
    """Refuse values that are below the least or above the most of these limits; those that are open are left open."""
    for name, (least, most) in limits.items():
        value = values[name]
        if isinstance(value, int | float) and not least <= value <= most:
            low = "above 0" if least == ABOVE_0 else f"at least {least:g}"
            high = "" if most == math.inf else f" and at most {most:g}"
            raise ValueError(f"{name} must be {low}{high}, got {value}")
