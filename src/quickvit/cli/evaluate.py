"""`quickvit verify` and `eval`: whether a model keeps its promises, and what it can do."""

from __future__ import annotations

from dataclasses import asdict

import torch
from jsonargparse import ArgumentParser, Namespace

from quickvit.cli import accuracy, protocols, rotation
from quickvit.cli.arguments import CHECKPOINT, MODEL
from quickvit.cli.build import is_random, load_named, require_vit
from quickvit.cli.command import Command, Parser
from quickvit.cli.output import NOTHING, print_json, print_table
from quickvit.data import input_size
from quickvit.evaluate import verify_symmetry
from quickvit.testing import randomize

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def verify(arguments: Namespace) -> int:
    """Measure equivariance and invariance under the eight elements; exit code 1 if a promise is broken."""
    model = require_vit(load_named(arguments), arguments.model)
    if is_random(arguments):
        randomize(model, arguments.seed)
    report = verify_symmetry(model, DTYPES[arguments.dtype], arguments.seed)
    if arguments.json:
        print_json(
            {
                "name": arguments.model,
                "checkpoint": arguments.checkpoint,
                "img_size": input_size(model)[1:],
                "dtype": arguments.dtype,
                "tolerance": report.tolerance,
                "promises": report.promises,
                "broken": report.broken,
                "worst": report.worst,
                "elements": [asdict(errors) for errors in report.errors],
            }
        )
    else:
        table = [[e.element, _error(e.equivariance), _error(e.invariance)] for e in report.errors]
        table.append(["worst", *(_error(report.worst[kind]) for kind in ("equivariance", "invariance"))])
        print_table(["element", "equivariance", "invariance"], table)
        promised = " and ".join(f"{promise} within {most:.0e}" for promise, most in report.tolerance.items())
        verdict = f"broken: {', '.join(report.broken)}" if report.broken else "kept"
        print(f"\npromised in {arguments.dtype}: {f'{promised}; {verdict}' if promised else 'nothing'}")
    return 1 if report.broken else 0


def _add_verify(parser: ArgumentParser) -> None:
    parser.add_argument("model", help=MODEL)
    parser.add_argument("--checkpoint", help=CHECKPOINT)
    parser.add_argument("--img-size", help="H or HxW, the model's own by default")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32", help="precision of the check")
    parser.add_argument("--seed", type=int, default=0, help="random seed for images and weights")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _error(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.1e}"


def evaluate(arguments: Namespace) -> int:
    """Measure what a trained model can do."""
    chosen = arguments[arguments.subcommand]
    chosen.command_line = arguments.command_line
    return EVALUATIONS[arguments.subcommand].run(chosen)


def _add_evaluations(parser: ArgumentParser) -> None:
    subcommands = parser.add_subcommands()
    for name, command in EVALUATIONS.items():
        inner = Parser(description=command.run.__doc__)
        command.add_arguments(inner)
        subcommands.add_subcommand(name, inner, help=command.run.__doc__)


EVALUATIONS: dict[str, Command] = {
    **accuracy.EVALUATIONS,
    **rotation.EVALUATIONS,
    **protocols.EVALUATIONS,
}
COMMANDS = {
    "verify": Command(verify, _add_verify),
    "eval": Command(evaluate, _add_evaluations),
}
