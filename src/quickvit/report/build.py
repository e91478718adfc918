"""The whole report: a page, and every table and figure as a file of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from quickvit.report.claims import judge
from quickvit.report.figures import FIGURES
from quickvit.report.page import GENERATOR, Part, claims_part, figures_part, page, sources_part, tables_part
from quickvit.report.results import Results, read_results
from quickvit.report.table import html, markdown
from quickvit.report.tables import TABLES

PAGE = "index.html"
OWNED = {"tables": (".md", ".html"), "figures": (".svg",)}


def build_report(
    bench: str | Path, runs: str | Path | None, out: str | Path, further: Sequence[Part] = ()
) -> Path:
    """Write the report of all results into a folder, in place of a former report there; the page's path.

    further: chapters of the page after the figures of results.
    """
    out = Path(out)
    former = _former(out)
    files = report_files(read_results(bench, runs), further)
    for path in former:
        path.unlink()
    for name, text in files.items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8", newline="\n")
    return out / PAGE


def report_files(results: Results, further: Sequence[Part] = ()) -> dict[str, str]:
    """The files of the report by their names; the same results give the same bytes."""
    chapters = {title: [table(results) for table in tables] for title, tables in TABLES.items()}
    drawings = [figure(results) for figure in FIGURES]
    findings = judge(results)
    parts = [
        claims_part(findings),
        figures_part(drawings),
        *further,
        *(tables_part(title, tables) for title, tables in chapters.items()),
        sources_part(results),
    ]
    files = {PAGE: page(results, findings, parts)}
    for table in (table for tables in chapters.values() for table in tables):
        files |= {f"tables/{table.id}.md": markdown(table), f"tables/{table.id}.html": html(table)}
    return files | {f"figures/{name}.svg": svg for d in drawings for name, svg in d.files.items()}


def _former(out: Path) -> list[Path]:
    """The files of a former report; anything else in the folder is not ours to write over."""
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file; expected a folder for the report")
    if not out.exists() or not any(out.iterdir()):
        return []
    page = out / PAGE
    if not page.is_file() or GENERATOR not in page.read_text(encoding="utf-8", errors="replace"):
        raise ValueError(f"{out} has files that are no report; give an empty or a new folder with --out")
    owned = [
        path
        for folder, endings in OWNED.items()
        for path in sorted((out / folder).glob("*"))
        if path.suffix in endings and path.is_file()
    ]
    return [page, *owned]
