"""What commands print: JSON and tables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

NOTHING = "–"


def print_json(value: Any) -> None:
    """A value as JSON; what JSON does not know is written as text, and a number that is not finite as null."""
    print(json.dumps(_finite(value), indent=2, default=str, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Columns padded to equal width, those of numbers to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [
        all(cell == NOTHING or cell.lstrip("+-")[:1].isdigit() for cell in column[1:]) for column in columns
    ]
    for row in (header, ["-" * width for width in widths], *rows):
        cells = (c.rjust(w) if r else c.ljust(w) for c, w, r in zip(row, widths, right, strict=True))
        print("  ".join(cells).rstrip())
