"""The rows of a benchmark, and the columns that it shows of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

from quickvit.bench.timing import Case, Failure, Settings, Timing
from quickvit.bench.work import Ceilings, floor_ms


@dataclass(frozen=True)
class Row:
    """What is known of one competitor in one case; None where a number was not measured.

    spread: distance of the quartiles of the samples, relative to the median. ratio: the time of the case's first
    row over this one's. floor_ms and over_floor: see `quickvit.bench.work`. intensity: FLOPs per byte.
    memory_ratio: the first row's peak memory over this one's. failure: why there are no numbers.
    """

    case: str
    name: str
    dtype: str | None = None
    ms: float | None = None
    spread: float | None = None
    images_per_s: float | None = None
    ratio: float | None = None
    floor_ms: float | None = None
    over_floor: float | None = None
    gflops: float | None = None
    tflops_per_s: float | None = None
    intensity: float | None = None
    memory_mib: float | None = None
    memory_ratio: float | None = None
    failure: str | None = None


HEADER = {
    "images_per_s": "images/s",
    "floor_ms": "floor ms",
    "over_floor": "time/floor",
    "gflops": "GFLOP",
    "tflops_per_s": "TFLOP/s",
    "intensity": "FLOP/byte",
    "memory_mib": "MiB",
    "memory_ratio": "memory ratio",
    "failure": "failed",
}
FORMAT = {"ms": ".4g", "floor_ms": ".4g", "ratio": ".2f", "over_floor": ".2f", "memory_ratio": ".2f"}
SPEED = ("case", "name", "dtype", "ms", "images_per_s", "ratio", "floor_ms", "over_floor")


def timed_rows(
    label: str,
    cases: Sequence[Case],
    outcomes: Mapping[str, Timing | Failure],
    settings: Settings,
    ceilings: Ceilings,
) -> list[Row]:
    """The rows of cases that were measured together; the first is what the others are compared with."""
    dtype = dtype_name(settings)
    first = outcomes[cases[0].name] if len(cases) > 1 else None
    rows = []
    for case in cases:
        outcome = outcomes[case.name]
        if isinstance(outcome, Failure):
            rows.append(Row(label, case.name, dtype, failure=outcome.reason))
            continue
        flops, moved = sum(w.flops for w in case.work), sum(w.bytes for w in case.work)
        floor = floor_ms(case.work, ceilings)
        rows.append(
            Row(
                label,
                case.name,
                dtype,
                ms=outcome.ms,
                spread=outcome.spread,
                images_per_s=None if case.images is None else case.images / outcome.ms * 1e3,
                ratio=first.ms / outcome.ms if isinstance(first, Timing) else None,
                floor_ms=floor,
                over_floor=outcome.ms / floor,
                gflops=flops / 1e9,
                tflops_per_s=flops / outcome.ms / 1e9,
                intensity=flops / moved,
            )
        )
    return rows


def with_memory(rows: Iterable[Row], peaks: Mapping[str, int]) -> list[Row]:
    """The rows with the peak memory of their names, in bytes, compared with that of the first."""
    rows = list(rows)
    first = peaks.get(rows[0].name)
    return [
        replace(
            row,
            memory_mib=peaks[row.name] / 2**20,
            memory_ratio=None if first is None else first / peaks[row.name],
        )
        if row.name in peaks
        else row
        for row in rows
    ]


def dtype_name(settings: Settings) -> str:
    """The dtype without its module."""
    return str(settings.dtype).removeprefix("torch.")


def table(rows: Sequence[Row], columns: Sequence[str]) -> tuple[list[str], list[list[str | None]]]:
    """Header and cells of these columns, less those that are empty everywhere; None for an empty cell."""
    known = {field.name for field in fields(Row)}
    if unknown := [name for name in (*columns, "failure") if name not in known]:
        raise ValueError(f"a row has no column {', '.join(unknown)}")
    shown = [c for c in (*columns, "failure") if any(getattr(row, c) is not None for row in rows)]
    cells = [[_cell(name, getattr(row, name)) for name in shown] for row in rows]
    return [HEADER.get(name, name) for name in shown], cells


def _cell(name: str, value: str | float | None) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if name in FORMAT:
        return format(value, FORMAT[name])
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
