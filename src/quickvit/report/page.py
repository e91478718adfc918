"""The page: parts put together with style and script, in one file that needs nothing else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from quickvit.group import D8
from quickvit.report.claims import Claim
from quickvit.report.figures import Drawing, inline
from quickvit.report.results import Results
from quickvit.report.rules import Finding, Verdict
from quickvit.report.table import LEGEND, Table, commands_html, html, sources_html, unique
from quickvit.report.tables.beside import times

Judged = tuple[Claim, Finding]
GENERATOR = '<meta name="generator" content="quickvit report">'
# Nothing may be fetched, whatever is written into the page.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
CLASSES = {
    Verdict.CONFIRMED: "confirmed",
    Verdict.NOT_CONFIRMED: "not-confirmed",
    Verdict.NOT_TESTABLE: "not-testable",
    Verdict.NOT_RUN: "not-run",
}


@dataclass(frozen=True)
class Part:
    """A chapter of the page: its id, its title, and its HTML."""

    id: str
    title: str
    html: str


def page(results: Results, findings: Sequence[Judged], parts: Sequence[Part]) -> str:
    """The whole page."""
    links = "".join(f'<a href="#{escape(part.id)}">{escape(part.title)}</a>' for part in parts)
    chapters = "".join(
        f'<section id="{escape(part.id)}">\n<h2>{escape(part.title)}</h2>\n{part.html}</section>\n'
        for part in parts
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n{GENERATOR}\n'
        f"<title>Quick ViTs: the paper and quickvit</title>\n<style>\n{_file('page.css')}</style>\n</head>\n<body>\n"
        "<header>\n<h1>Quick ViTs, measured</h1>\n"
        '<p class="lead">Vision transformers that commute with rotations and mirrorings: every table and claim of '
        "the paper beside what <code>quickvit</code> computes and measures.</p>\n"
        f"{_tiles(results, findings)}</header>\n"
        f'<nav aria-label="chapters"><div>{links}</div><button id="theme" type="button">theme</button></nav>\n'
        f"<main>\n{chapters}</main>\n"
        "<footer><p>Written by <code>quickvit report</code> from the JSON files of benchmarks and studies. The "
        "paper: Nordström, Edstedt, Kahl, Bökman, “Quick ViTs: Speeding up Vision Transformers through "
        "Equivariance”.</p></footer>\n"
        f"<script>\n{_file('page.js')}</script>\n</body>\n</html>\n"
    )


def _file(name: str) -> str:
    return files("quickvit.report").joinpath(name).read_text(encoding="utf-8")


# ---------------------------------------------------------------------- parts


def claims_part(findings: Sequence[Judged]) -> Part:
    """Every claim with its verdict."""
    counts = Counter(finding.verdict for _, finding in findings)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    rule = (
        "The verdicts are computed. A difference of two means counts if it is larger than twice its standard error "
        "over the seeds and than 0.2 points, by which the paper’s own matches differ."
    )
    items = "".join(_claim(claim, finding) for claim, finding in findings)
    text = f'<p>Of {len(findings)} claims: {escape(summary)}.</p>\n<p>{rule}</p>\n<ul class="claims">\n{items}</ul>\n'
    return Part("claims", "Claims", text)


def _claim(claim: Claim, finding: Finding) -> str:
    place = f'<a href="#{escape(claim.table)}">table</a>, paper {escape(claim.label)}'
    evidence = f"{escape(finding.evidence)} · " if finding.evidence else ""
    return (
        f'<li><span class="verdict {CLASSES[finding.verdict]}">{escape(finding.verdict)}</span>'
        f'<p>{escape(claim.sentence)}</p><p class="evidence">{evidence}{place}</p></li>\n'
    )


def figures_part(drawings: Iterable[Drawing]) -> Part:
    """The figures of results."""
    return Part("figures", "Figures", f'<div class="figures">\n{"".join(map(_figure, drawings))}</div>\n')


def _figure(drawing: Drawing) -> str:
    panels = "".join(inline(name, svg) for name, svg in drawing.files.items())
    picture = f'<div class="panels">\n{panels}</div>\n' if panels else '<p class="empty">not run</p>\n'
    wide = ' class="wide"' if len(drawing.panels) > 1 else ""
    return (
        f'<figure id="{drawing.id}"{wide}>\n<h3>{escape(drawing.title)}</h3>\n{picture}'
        f"<figcaption>{escape(drawing.caption)}</figcaption>\n{commands_html(drawing.commands)}</figure>\n"
    )


def tables_part(title: str, tables: Iterable[Table]) -> Part:
    """A chapter of tables."""
    return Part(title.lower().replace(" ", "-"), title, "".join(map(html, tables)))


def sources_part(results: Results) -> Part:
    """What the numbers come from, and what their colours mean."""
    legend = "".join(
        f'<li><span class="origin {origin}">{origin}</span>{escape(words)}</li>\n'
        for origin, words in LEGEND.items()
    )
    sources = unique([m.source for m in results.measurements] + [run.source for run in results.runs])
    text = (
        f"<p>{len(results.measurements)} records of benchmarks and {len(results.runs)} training runs.</p>\n"
        f"<ul>\n{legend}</ul>\n<p>± is the standard deviation over seeds. What was not run says so, with its command."
        f"</p>\n{sources_html(sources)}"
    )
    return Part("sources", "Sources", text)


# ---------------------------------------------------------------------- at a glance


def _tiles(results: Results, findings: Sequence[Judged]) -> str:
    """The largest saving by formula, the largest measured speed-ups, the claims."""
    tiles = [(times(D8.flop_reduction), "fewer FLOPs in an octic linear layer, by formula")]
    for gpu in (True, False):
        rows = [
            (row.ratio, row, measurement)
            for measurement, row in results.measured("model")
            if row.ratio and measurement.source.gpu == gpu and row.case.endswith(" forward")
        ]
        if rows:
            ratio, row, measurement = max(rows, key=lambda found: found[0])
            model = row.case.removesuffix(" forward")
            words = f"as fast as timm’s {model}: {row.name}, {measurement.source.hardware}"
            tiles.append((times(ratio), words))
    confirmed = sum(finding.verdict == Verdict.CONFIRMED for _, finding in findings)
    tiles.append((f"{confirmed} of {len(findings)}", "claims of the paper confirmed here so far"))
    items = "".join(
        f"<li><b>{escape(value)}</b><span>{escape(words)}</span></li>\n" for value, words in tiles
    )
    return f'<ul class="tiles">\n{items}</ul>\n'
