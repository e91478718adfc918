"""What commands print: JSON and tables."""

from __future__ import annotations

import json
from typing import Any

NOTHING = "–"


def print_json(value: Any) -> None:
    """A value as JSON; what JSON does not know is written as text."""
    print(json.dumps(value, indent=2, default=str))


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
