"""The page of the report: its parts, and what they are put together with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from quickvit.group import D8
from quickvit.report.claims import Claim
from quickvit.report.document import document, resource
from quickvit.report.exploration import Exploration
from quickvit.report.explorer import explorer_fragment
from quickvit.report.results import Results
from quickvit.report.rules import RULE, Finding, Verdict
from quickvit.report.svg import Drawing
from quickvit.report.symmetry import EXPLORE
from quickvit.report.table import LEGEND, NOT_RUN, Table, commands_html, html, sources_html, unique
from quickvit.report.tables.beside import times
from quickvit.report.tables.speed import FORWARD, cases

Judged = tuple[Claim, Finding]
GENERATOR = '<meta name="generator" content="quickvit report">'
FILES = '<meta name="files" content="{}">'
EMPTY = f'<p class="empty">{NOT_RUN}</p>\n'
CLASSES = {
    Verdict.CONFIRMED: "confirmed",
    Verdict.NOT_CONFIRMED: "not-confirmed",
    Verdict.UNDECIDED: "undecided",
    Verdict.NOT_TESTABLE: "not-testable",
    Verdict.NOT_RUN: "not-run",
}


@dataclass(frozen=True)
class Part:
    """A chapter of the page: its id, its title, and its HTML."""

    id: str
    title: str
    html: str


def page(
    results: Results, findings: Sequence[Judged], parts: Sequence[Part], files: Iterable[str] = ()
) -> str:
    """The whole page. files: the names of those beside it, which a later report may delete."""
    links = "".join(f'<a href="#{escape(part.id)}">{escape(part.title)}</a>' for part in parts)
    chapters = "".join(
        f'<section id="{escape(part.id)}">\n<h2>{escape(part.title)}</h2>\n{part.html}</section>\n'
        for part in parts
    )
    body = (
        "<header>\n<h1>Quick ViTs, measured</h1>\n"
        '<p class="lead">Vision transformers that commute with rotations and mirrorings: the paper\'s tables and '
        "claims beside what <code>quickvit</code> computes and measures.</p>\n"
        f"{_tiles(results, findings)}</header>\n"
        f'<nav aria-label="chapters"><div>{links}</div><button id="theme" type="button">theme</button></nav>\n'
        f"<main>\n{chapters}</main>\n"
        "<footer><p>Written by <code>quickvit report</code> from the JSON files of benchmarks and studies. The "
        "paper: Nordström, Edstedt, Kahl, Bökman, “Quick ViTs: Speeding up Vision Transformers through "
        "Equivariance”.</p></footer>\n"
        f"<script>\n{resource('page.js')}\n</script>"
    )
    return document(
        "Quick ViTs: the paper and quickvit", body, f"{GENERATOR}\n{FILES.format(escape(' '.join(files)))}\n"
    )


# ---------------------------------------------------------------------- parts


def claims_part(findings: Sequence[Judged]) -> Part:
    """Every claim with its verdict."""
    counts = Counter(finding.verdict for _, finding in findings)
    summary = ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    items = "".join(_claim(claim, finding) for claim, finding in findings)
    words = f"<p>Of {len(findings)} claims: {escape(summary)}.</p>\n<p>{escape(RULE)}</p>\n"
    return Part("claims", "Claims", f'{words}<ul class="claims">\n{items}</ul>\n')


def _claim(claim: Claim, finding: Finding) -> str:
    place = f'<a href="#{escape(claim.table)}">table</a>, paper {escape(claim.label)}'
    evidence = f"{escape(finding.evidence)} · " if finding.evidence else ""
    return (
        f'<li><span class="verdict {CLASSES[finding.verdict]}">{escape(finding.verdict)}</span>'
        f'<p>{escape(claim.sentence)}</p><p class="evidence">{evidence}{place}</p></li>\n'
    )


def figures_part(title: str, drawings: Iterable[Drawing]) -> Part:
    """A chapter of figures."""
    return Part(_slug(title), title, f'<div class="figures">\n{"".join(map(_figure, drawings))}</div>\n')


def _figure(drawing: Drawing) -> str:
    panels, label = "\n".join(drawing.panels), escape(drawing.title)
    scroll = f' scroll" tabindex="0" role="region" aria-label="{label}' if drawing.wide else ""
    picture = f'<div class="panels{scroll}">\n{panels}\n</div>\n' if panels else EMPTY
    wide = ' class="wide"' if drawing.wide or len(drawing.panels) > 1 else ""
    return (
        f'<figure id="{drawing.id}"{wide}>\n<h3>{label}</h3>\n{picture}'
        f"<figcaption>{escape(drawing.caption)}</figcaption>\n{commands_html(drawing.commands)}</figure>\n"
    )


def explorer_part(exploration: Exploration | None) -> Part:
    """The explorer."""
    text = f"{explorer_fragment(exploration)}\n" if exploration else EMPTY + commands_html(EXPLORE)
    return Part("turn", "Turn an image", text)


def tables_part(title: str, tables: Iterable[Table]) -> Part:
    """A chapter of tables."""
    return Part(_slug(title), title, "".join(map(html, tables)))


def _slug(title: str) -> str:
    return title.lower().replace(" ", "-")


def sources_part(results: Results) -> Part:
    """What the numbers come from, and what their colours mean."""
    legend = "".join(
        f'<li><span class="origin {origin}">{origin}</span>{escape(words)}</li>\n'
        for origin, words in LEGEND.items()
    )
    sources = unique(
        [m.source for m in results.measurements]
        + [run.source for run in results.runs]
        + [evaluation.source for evaluation in results.evaluations]
        + ([results.exploration.source] if results.exploration and results.exploration.source else [])
    )
    text = (
        f"<p>{len(results.measurements)} records of benchmarks, {len(results.runs)} training runs and "
        f"{len(results.evaluations)} evaluations.</p>\n"
        f"<ul>\n{legend}</ul>\n<p>± is the standard deviation over seeds. What was not run says so, with its command."
        f"</p>\n{sources_html(sources)}"
    )
    return Part("sources", "Sources", text)


# ---------------------------------------------------------------------- at a glance


def _tiles(results: Results, findings: Sequence[Judged]) -> str:
    """The saving by formula, the largest speed-ups that were measured, best of whole models, and the claims."""
    tiles = [(times(D8.flop_reduction), "fewer FLOPs in an octic linear layer, by formula")]
    for gpu in (True, False):
        rows = [
            ("," not in match[1], row.ratio, match[1], row, measurement)
            for match, measurement, row in cases(results, FORWARD, "model")
            if row.ratio and measurement.source.gpu == gpu
        ]
        if rows:
            _, ratio, model, row, measurement = max(rows, key=lambda found: found[:2])
            words = f"as fast as timm’s {model}: {row.name}, {measurement.source.hardware}"
            tiles.append((times(ratio), words))
    confirmed = sum(finding.verdict == Verdict.CONFIRMED for _, finding in findings)
    tiles.append((f"{confirmed} of {len(findings)}", "claims of the paper confirmed here so far"))
    items = "".join(
        f"<li><b>{escape(value)}</b><span>{escape(words)}</span></li>\n" for value, words in tiles
    )
    return f'<ul class="tiles">\n{items}</ul>\n'
