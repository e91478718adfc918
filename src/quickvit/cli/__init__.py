"""Train, evaluate, verify and time Quick ViTs."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

from jsonargparse import ArgumentParser, Namespace

from quickvit import __version__
from quickvit.cli import bench, demo, evaluate, explore, images, models, report, train
from quickvit.cli.command import Command, Parser

COMMANDS: dict[str, Command] = {
    **models.COMMANDS,
    **images.COMMANDS,
    **evaluate.COMMANDS,
    **train.COMMANDS,
    **bench.COMMANDS,
    **report.COMMANDS,
    **explore.COMMANDS,
    **demo.COMMANDS,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code.

    0 good, 1 a check failed, 2 wrong arguments or files, 75 stopped by a signal and ready to go on, 130 interrupted.
    """
    command, arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        return command.run(arguments)
    except BrokenPipeError:
        # Whoever reads the output has seen enough; what is still buffered must not complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("quickvit: interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, ModuleNotFoundError) as error:
        print(f"quickvit: error: {error}", file=sys.stderr)
        return 2


def parse(argv: Sequence[str]) -> tuple[Command, Namespace]:
    """The command of a command line and its arguments; wrong ones end the program with code 2."""
    argv = _spelled(argv)
    if not argv or argv[0] not in COMMANDS:
        _overview().parse_args(argv)
    name, *rest = argv
    command = COMMANDS[name]
    parser = Parser(prog=f"quickvit {name}", description=command.run.__doc__)
    command.add_arguments(parser)
    arguments = parser.parse_args(rest)
    arguments.command_line = shlex.join(["quickvit", *argv])
    return command, arguments


def _spelled(argv: Sequence[str]) -> Sequence[str]:
    """The options of recipes are names of Python, but --batch-size will do for --batch_size as elsewhere."""
    if list(argv[:1]) != ["train"]:
        return argv
    return [
        re.sub(r"^--[\w.-]+", lambda option: "--" + option[0][2:].replace("-", "_"), word) for word in argv
    ]


def _overview() -> ArgumentParser:
    """The parser of command lines that call no command: for --help, --version and mistakes."""
    parser = Parser(prog="quickvit", description=__doc__, version=__version__)
    subcommands = parser.add_subcommands()
    for name, command in COMMANDS.items():
        subcommands.add_subcommand(name, Parser(), help=command.run.__doc__)
    return parser
