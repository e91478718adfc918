"""A command: what it does and what it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from jsonargparse import ArgumentParser, Namespace


class Command(NamedTuple):
    """`run` returns the exit code, and its docstring is the help; `add_arguments` is called if it is chosen."""

    run: Callable[[Namespace], int]
    add_arguments: Callable[[ArgumentParser], None]
