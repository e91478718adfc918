"""Writes docs/results.md: `python docs/results.py` takes the tables of the report that have a number of ours.

A test holds that the page is what this script writes.
"""

from __future__ import annotations

from pathlib import Path

from quickvit.report.claims import judge
from quickvit.report.figures import FIGURES
from quickvit.report.results import Results, read_results
from quickvit.report.rules import RULE
from quickvit.report.svg import Drawing
from quickvit.report.table import markdown, plain
from quickvit.report.tables import TABLES

PAGE = Path(__file__).parent / "results.md"
PICTURES = Path(__file__).parent / "results"
BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
HEAD = """# Results

Written by `python docs/results.py` from the files in `benchmarks/`: only the paper's numbers were typed in. Where a
cell says "not run", the command that would run it stands below the table. "here" is this library, "paper" the paper,
"formula" was computed. All accuracies here are of small models on small data sets. [The report](report.md) has the
same tables and more figures; [kernels](kernels.md) says where the time goes.
"""
CLAIMS = f"""## The paper's claims

{RULE}

| claim | verdict | evidence | paper |
| :-- | :-- | :-- | :-- |"""


def page(results: Results) -> str:
    """The claims, the figures, and all tables with a number of ours by chapter."""
    parts = [HEAD, CLAIMS]
    for claim, finding in judge(results):
        cells = (claim.sentence, finding.verdict, finding.evidence, claim.label)
        parts.append(f"| {' | '.join(map(plain, cells))} |")
    parts.append("\n## Figures\n")
    for drawing in drawings(results):
        parts.append(f"### {plain(drawing.title)}\n\n{plain(drawing.caption)}\n")
        parts += [f"![{plain(drawing.title)}]({PICTURES.name}/{name}.svg)" for name in drawing.files]
        parts.append("")
    for chapter, functions in TABLES.items():
        tables = [table for function in functions if (table := function(results)).ours]
        if tables:
            parts.append(f"## {chapter}\n")
        # A table is a page of its own; here it is a section of a chapter.
        parts += [f"##{markdown(table)}" for table in tables]
    return "\n".join(parts)


def drawings(results: Results) -> list[Drawing]:
    """The figures that show a result."""
    return [drawing for figure in FIGURES if (drawing := figure(results)).panels]


def main() -> None:
    """Write the page and its figures."""
    results = read_results(BENCHMARKS)
    PAGE.write_text(page(results), encoding="utf-8", newline="\n")
    PICTURES.mkdir(exist_ok=True)
    for file in PICTURES.glob("*.svg"):
        file.unlink()
    for drawing in drawings(results):
        for name, svg in drawing.files.items():
            (PICTURES / f"{name}.svg").write_text(f"{svg}\n", encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
