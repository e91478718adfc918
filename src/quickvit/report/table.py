"""A table of the report, and how it is written: Markdown and HTML, from the same cells."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from quickvit.report.entry import Source

NOT_RUN = "not run"
# The paper has no such number.
NOTHING = "–"
HERE, PAPER, FORMULA = "here", "paper", "formula"
LEGEND = {HERE: "measured here", PAPER: "quoted from the paper", FORMULA: "computed here, not measured"}
# Cells with more letters may wrap.
LONG = 16
# What a command says of its seed, and the seed in the name of a run.
SEED = re.compile(r"--seed[= ]\d+|(--out[= ]\S+)-\d+")


@dataclass(frozen=True)
class Column:
    """A heading and where the numbers below come from: here, paper, formula, or nowhere for names of rows."""

    title: str
    origin: str = ""


@dataclass(frozen=True)
class Table:
    """Cells in words, with what is needed to judge them.

    quotes: the paper's table and its setting. note: what a reader should know. commands: would fill the cells
    that say "not run".
    """

    id: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    quotes: str = ""
    note: str = ""
    sources: tuple[Source, ...] = ()
    commands: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            if len(row) != len(self.columns):
                raise ValueError(
                    f"{self.id}: {len(row)} cells in a row of {len(self.columns)} columns: {row}"
                )

    @property
    def gaps(self) -> bool:
        """Whether something was not run."""
        return any(NOT_RUN in row for row in self.rows)

    @property
    def ours(self) -> bool:
        """Whether a number in it is ours."""
        return any(
            column.origin in (HERE, FORMULA) and cell not in (NOT_RUN, NOTHING)
            for row in self.rows
            for column, cell in zip(self.columns, row, strict=True)
        )


def unique(sources: Iterable[Source]) -> tuple[Source, ...]:
    """Each source once, in order."""
    return tuple(dict.fromkeys(sources))


# ---------------------------------------------------------------------- Markdown


def markdown(table: Table) -> str:
    """The table as a page of Markdown."""
    heads = [plain(f"{c.title} ({c.origin})" if c.origin else c.title) for c in table.columns]
    lines = [f"# {plain(table.title)}", ""]
    lines += [f"{plain(text)}\n" for text in (table.note, _quotes(table)) if text]
    lines += [_line(heads), _line([":--" if not c.origin else "--:" for c in table.columns])]
    lines += [_line([plain(cell) for cell in row]) for row in table.rows]
    if table.gaps and table.commands:
        lines += ["", "What was not run is run by", "", *(f"    {one_line(c)}" for c in table.commands)]
    if table.sources:
        lines += ["", "Measured:"]
    for sources in _by_seed(table.sources):
        lines += ["", f"- {plain(_origin(sources))}", "", f"      {one_line(sources[0].command)}"]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def plain(text: str) -> str:
    """Text that Markdown leaves as it is."""
    return re.sub(r"([\\`*_\[\]<>|#&!])", r"\\\1", one_line(text))


def one_line(text: str) -> str:
    """Text without line breaks."""
    return " ".join(text.split())


# ---------------------------------------------------------------------- HTML


def html(table: Table) -> str:
    """The table as a part of a page, folded away if nothing in it is ours."""
    head = "".join(_head(column) for column in table.columns)
    body = "".join(f"<tr>{_cells(table.columns, row)}</tr>\n" for row in table.rows)
    notes = "".join(f"<p>{escape(text)}</p>\n" for text in (table.note, _quotes(table)) if text)
    state = "" if table.ours else f' <span class="state">{NOT_RUN}</span>'
    return (
        f'<details class="table" id="{escape(table.id)}"{" open" if table.ours else ""}>\n'
        f"<summary><h3>{escape(table.title)}</h3>{state}</summary>\n{notes}"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table></div>\n"
        f"{_commands(table)}{sources_html(table.sources)}</details>\n"
    )


def _head(column: Column) -> str:
    if not column.origin:
        return f'<th scope="col">{escape(column.title)}</th>'
    origin = f'<span class="origin {column.origin}">{column.origin}</span>'
    return f'<th scope="col" class="number">{escape(column.title)}{origin}</th>'


def _cells(columns: Sequence[Column], row: Sequence[str]) -> str:
    first, *rest = row
    cells = (_cell(column, cell) for column, cell in zip(columns[1:], rest, strict=True))
    return f'<th scope="row">{escape(first)}</th>{"".join(cells)}'


def _cell(column: Column, cell: str) -> str:
    classes = f"number {column.origin}" if column.origin else "words" if len(cell) > LONG else ""
    if cell == NOT_RUN:
        classes += " gap"
    return f'<td class="{classes}">{escape(cell)}</td>' if classes else f"<td>{escape(cell)}</td>"


def _commands(table: Table) -> str:
    return commands_html(table.commands) if table.gaps else ""


def commands_html(commands: Iterable[str]) -> str:
    """The commands that would run what was not."""
    lines = "\n".join(escape(one_line(command)) for command in commands)
    if not lines:
        return ""
    return (
        f"<details><summary>What was not run, and the command for it</summary><pre>{lines}</pre></details>\n"
    )


def sources_html(sources: Iterable[Source]) -> str:
    """Hardware, date and command of what was measured."""
    items = "".join(
        f"<li>{escape(_origin(group))}<pre>{escape(one_line(group[0].command))}</pre></li>\n"
        for group in _by_seed(sources)
    )
    return (
        f"<details><summary>Hardware, dates, commands</summary><ul>\n{items}</ul></details>\n"
        if items
        else ""
    )


# ---------------------------------------------------------------------- words


def _quotes(table: Table) -> str:
    return f"Paper: {table.quotes}." if table.quotes else ""


def _by_seed(sources: Iterable[Source]) -> list[list[Source]]:
    """Sources that differ in the seed alone, together."""
    groups: dict[tuple[str, ...], list[Source]] = {}
    for source in sources:
        command = SEED.sub(r"\1", source.command)
        key = (source.hardware, source.date, source.commit, source.remark, command)
        groups.setdefault(key, []).append(source)
    return list(groups.values())


def _origin(sources: Sequence[Source]) -> str:
    """Where numbers come from; runs with several seeds are named by the command of the first."""
    first, *others = sources
    files = [first.file, *(Path(source.file).name for source in others)]
    parts = [*files, first.hardware, first.date, first.commit and f"commit {first.commit[:12]}"]
    return ", ".join(part for part in (*parts, first.remark) if part)
