"""A command: what it does and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace


class Parser(ArgumentParser):
    """A parser of options that are written out: an abbreviation would change its meaning with the next option."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)


class Command(NamedTuple):
    """`run` returns the exit code, and its docstring is the help; `add_arguments` is called if it is chosen."""

    run: Callable[[Namespace], int]
    add_arguments: Callable[[ArgumentParser], None]
