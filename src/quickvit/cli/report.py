"""`quickvit report`: the paper's tables, figures and claims beside what was measured."""

from __future__ import annotations

from importlib.util import find_spec

from jsonargparse import ArgumentParser, Namespace

from quickvit.cli.command import Command


def report(arguments: Namespace) -> int:
    """Write a page of the paper's tables, figures and claims beside what was measured."""
    if find_spec("matplotlib") is None:
        raise ModuleNotFoundError(
            'the report needs matplotlib: pip install "quickvit[report]"', name="matplotlib"
        )
    from quickvit.report.build import build_report

    print(build_report(arguments.bench, arguments.runs, arguments.out))
    return 0


def _add_report(parser: ArgumentParser) -> None:
    parser.add_argument("--bench", default="benchmarks", help="folder of what `quickvit bench --out` wrote")
    parser.add_argument("--runs", help="folder of the studies' results; `results` in --bench by default")
    parser.add_argument("--out", default="report", help="folder to write; a former report there is replaced")


COMMANDS = {"report": Command(report, _add_report)}
