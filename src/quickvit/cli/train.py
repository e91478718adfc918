"""`quickvit train`: the recipes, on this machine or on a cluster, and the replay of what went wrong."""

from __future__ import annotations

import logging
import sys
from dataclasses import asdict, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any, get_type_hints

from jsonargparse import ArgumentParser, Namespace, set_parsing_settings

from quickvit.cli.build import choose_device
from quickvit.cli.command import Command, Parser
from quickvit.cli.output import print_json

# The recipes bring PyTorch's distributed parts along, so they are imported when one is called.


def train(arguments: Namespace) -> int:
    """Train a model by a recipe of the paper, or go on where a run was interrupted."""
    from quickvit.recipes import RECIPES
    from quickvit.train import EXIT_REQUEUE, NonFinite
    from quickvit.train.slurm import SlurmConfig, submit

    logging.basicConfig(format="quickvit: %(message)s", level=logging.INFO)
    name = arguments.subcommand
    chosen = arguments[name]
    if name == "replay":
        return _replay(chosen)
    config = _build(RECIPES[name].config, chosen)
    slurm = _build(SlurmConfig, chosen.slurm)
    try:
        if slurm.nodes is not None:
            work = partial(RECIPES[name].train, config, arguments.command_line)
            job = submit(work, slurm, config.out / "slurm")
            print(f"submitted {job.job_id}, logs in {config.out / 'slurm'}")
            return 0
        outcome = RECIPES[name].train(config, arguments.command_line)
    except NonFinite as error:
        print(f"quickvit: {error}", file=sys.stderr)
        return 1
    return EXIT_REQUEUE if outcome.stopped else 0


def _replay(arguments: Namespace) -> int:
    """Compute a captured update again and say where it stops being finite; exit code 1 if it does."""
    from quickvit.recipes import RECIPES
    from quickvit.train import read_capture, replay

    folder = Path(arguments.capture)
    about = read_capture(folder)
    if about.get("recipe") not in RECIPES:
        raise ValueError(f"{folder} is of a recipe that this version does not know: {about.get('recipe')!r}")
    recipe = RECIPES[about["recipe"]]
    settings = _recipe_parser(recipe.config).parse_object(
        {**about["settings"], "data": "", "out": str(folder)}
    )
    result = replay(
        recipe.rebuild(_build(recipe.config, settings)),
        folder,
        arguments.rank,
        choose_device(arguments.device),
    )
    if arguments.json:
        print_json({**asdict(result), "finite": result.finite})
    else:
        for metric, value in result.metrics.items():
            print(f"{metric} {value:g}")
        print(f"first output that is not finite: {result.output or 'none'}")
        print(f"gradients that are not finite: {', '.join(result.gradients) or 'none'}")
    return 0 if result.finite else 1


def _add_train(parser: ArgumentParser) -> None:
    from quickvit.recipes import RECIPES
    from quickvit.train.slurm import SlurmConfig

    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    subcommands = parser.add_subcommands()
    for name, recipe in RECIPES.items():
        inner = _recipe_parser(recipe.config)
        inner.add_class_arguments(SlurmConfig, "slurm")
        subcommands.add_subcommand(name, inner, help=recipe.config.__doc__)
    inner = Parser(description=_replay.__doc__)
    inner.add_argument("capture", help="folder below RUN/captured")
    inner.add_argument("--rank", type=int, default=0, help="whose batch")
    inner.add_argument("--device", help="cuda where there is one, else cpu")
    inner.add_argument("--json", action="store_true", help="print JSON")
    subcommands.add_subcommand("replay", inner, help=_replay.__doc__)


def _recipe_parser(config: type[Any]) -> ArgumentParser:
    parser = Parser(description=config.__doc__)
    parser.add_argument("--config", action="config", help="YAML or JSON file with any of the options below")
    parser.add_class_arguments(config)
    return parser


def _build(config: type[Any], arguments: Namespace) -> Any:
    """A configuration from the arguments of its names."""
    hints = get_type_hints(config)
    values = {f.name: arguments[f.name] for f in fields(config)}
    for name, value in values.items():
        if is_dataclass(hints[name]):
            values[name] = _build(hints[name], value)
    return config(**values)


COMMANDS = {"train": Command(train, _add_train)}
