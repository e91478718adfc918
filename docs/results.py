"""Writes docs/results.md: `python docs/results.py` takes the tables of the report that have a number of ours.

A test holds that the page is what this script writes.
"""

from __future__ import annotations

from pathlib import Path

from quickvit.report.results import Results, read_results
from quickvit.report.table import markdown
from quickvit.report.tables import TABLES

PAGE = Path(__file__).parent / "results.md"
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
HEAD = """# Results

Written by `python docs/results.py` from the files in `benchmarks/`: no number here was typed in, but for the
paper's. "not run" is said with the command that would run it. [The report](report.md) has the same tables beside
figures and the paper's claims; [performance](performance.md) says where the time goes.
"""


def page(results: Results) -> str:
    """All tables with a number of ours, by chapter."""
    parts = [HEAD]
    for chapter, functions in TABLES.items():
        tables = [table for function in functions if (table := function(results)).ours]
        if tables:
            parts.append(f"## {chapter}\n")
        # A table is a page of its own; here it is a section of a chapter.
        parts += [f"##{markdown(table)}" for table in tables]
    return "\n".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(read_results(BENCHMARKS)), encoding="utf-8", newline="\n")
