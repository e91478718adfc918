"""Schedules: values that are functions of the step alone, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Callable

Schedule = Callable[[int], float]
"""A value as a function of the step."""


def constant(value: float) -> Schedule:
    """The same value at every step."""
    return lambda step: value  # noqa: ARG005


def scaled(schedule: Schedule, factor: float) -> Schedule:
    """So many times the value of another schedule."""
    return lambda step: factor * schedule(step)


def cosine(start: float, end: float, total: int) -> Schedule:
    """Half a cosine from `start` at step 0 to `end` at step `total`, and `end` from there on."""

    def value(step: int) -> float:
        done = min(1.0, step / total) if total else 1.0
        return end + (start - end) * (1 + math.cos(math.pi * done)) / 2

    return value


def warmup_cosine(peak: float, end: float, total: int, warmup: int = 0, start: float = 0.0) -> Schedule:
    """A line from `start` towards `peak` for `warmup` steps, then the cosine from `peak` to `end`.

    As in timm and DeiT the cosine runs from step 0 on, also while the warm-up replaces it.
    """
    decay = cosine(peak, end, total)
    return lambda step: start + (peak - start) * step / warmup if step < warmup else decay(step)


def warmup_then_cosine(peak: float, end: float, total: int, warmup: int = 0, start: float = 0.0) -> Schedule:
    """A line from `start` at step 0 to `peak` at the last of `warmup` steps, then a cosine to `end` at step `total`.

    As in DINOv2, where the cosine begins with the step after the warm-up.
    """
    decay = cosine(peak, end, total - warmup)

    def value(step: int) -> float:
        if step < warmup:
            return start + (peak - start) * step / max(warmup - 1, 1)
        return decay(step - warmup)

    return value
