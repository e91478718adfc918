"""`quickvit demo`: the demonstration."""

from __future__ import annotations

from pathlib import Path

from jsonargparse import ArgumentParser, Namespace

from quickvit.cli.command import Command
from quickvit.cli.output import print_json


def demo(arguments: Namespace) -> int:
    """Train a small ViT, h8 and i8 on digits, and compare them."""
    from quickvit.demo import DemoConfig, format_table, run_demo

    given = {key: arguments[key] for key in ("seed", "epochs") if arguments[key] is not None}
    if arguments.out is not None:
        given["out"] = Path(arguments.out)
    config = DemoConfig(**given)
    try:
        result = run_demo(config)
    except ModuleNotFoundError as error:
        raise ValueError(error.msg) from error
    if arguments.json:
        print_json(result)
    else:
        print(f"{format_table(result)}\n\npicture and numbers: {config.out}")
    return 0


def _add_demo(parser: ArgumentParser) -> None:
    parser.add_argument("--out", help="folder for the results")
    parser.add_argument("--seed", type=int, help="of data, weights and order")
    parser.add_argument("--epochs", type=int, help="length of training")
    parser.add_argument("--json", action="store_true", help="print JSON")


COMMANDS = {"demo": Command(demo, _add_demo)}
