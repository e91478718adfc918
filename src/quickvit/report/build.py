"""The whole report: a page, and every table and figure as a file of its own."""

from __future__ import annotations

import re
from pathlib import Path

from quickvit.report.claims import judge
from quickvit.report.figures import FIGURES
from quickvit.report.page import (
    FILES,
    GENERATOR,
    claims_part,
    explorer_part,
    figures_part,
    page,
    sources_part,
    tables_part,
)
from quickvit.report.results import Results, read_results
from quickvit.report.symmetry import SYMMETRY
from quickvit.report.table import html, markdown
from quickvit.report.tables import TABLES

PAGE = "index.html"
FOLDERS = ("tables", "figures")


def build_report(
    bench: str | Path, runs: str | Path | None, out: str | Path, explored: str | Path | None = None
) -> Path:
    """Write the report of all results into a folder, in place of a former report there; the page's path.

    bench, runs, explored: as `read_results` takes them.
    """
    out = Path(out)
    former = _former(out)
    files = report_files(read_results(bench, runs, explored))
    for path in former:
        path.unlink()
    for name, text in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    return out / PAGE


def report_files(results: Results) -> dict[str, str]:
    """The files of the report by their names; the same results give the same bytes."""
    chapters = {title: [table(results) for table in tables] for title, tables in TABLES.items()}
    drawings = {
        title: [figure(results) for figure in figures]
        for title, figures in (("Figures", FIGURES), ("Symmetry", SYMMETRY))
    }
    findings = judge(results)
    parts = [
        claims_part(findings),
        *(figures_part(title, figures) for title, figures in drawings.items()),
        explorer_part(results.exploration),
        *(tables_part(title, tables) for title, tables in chapters.items()),
        sources_part(results),
    ]
    files: dict[str, str] = {}
    for table in (table for tables in chapters.values() for table in tables):
        files |= {f"tables/{table.id}.md": markdown(table), f"tables/{table.id}.html": html(table)}
    for drawing in (drawing for figures in drawings.values() for drawing in figures):
        files |= {f"figures/{name}.svg": f"{svg}\n" for name, svg in drawing.files.items()}
    return {PAGE: page(results, findings, parts, files), **files}


def _former(out: Path) -> list[Path]:
    """The files of a former report; anything else in the folder is not ours to write over."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; expected a folder for the report")
    if not out.exists() or not any(out.iterdir()):
        return []
    page = out / PAGE
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    if GENERATOR not in text:
        raise ValueError(f"{out} has files that are no report; give an empty or a new folder with --out")
    listed = re.search(FILES.format('([^"]*)'), text)
    names = set(listed[1].split()) if listed else set()
    beside = (path for folder in FOLDERS for path in sorted((out / folder).glob("*")))
    return [page, *(path for path in beside if path.relative_to(out).as_posix() in names and path.is_file())]
