"""Which tile a kernel runs with: what tuning found for this GPU, else the kernel's own choice.

The tables in the kernels were measured on an NVIDIA H200. `quickvit tune` looks for better ones and keeps them in
the folder quickvit/tiles of `$XDG_CACHE_HOME`, or of ~/.cache, in one file per kind of GPU.
"""

import json
import logging
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from quickvit.ops.storage import cache_folder

logger = logging.getLogger(__name__)

Tile = tuple[int, ...]

# What a tuner tries out, and what it wants to be told of.
_trial: dict[str, Tile] = {}
_requests: dict[str, Tile] | None = None


def tile(kernel: str, shape: tuple[int, ...], device: torch.device, default: Tile) -> Tile:
    """The tile of a kernel for operands of this shape."""
    name = f"{kernel} {'x'.join(map(str, shape))}"
    chosen = default
    if name in _trial:
        chosen = _trial[name]
    elif device.type == "cuda":
        found = stored(torch.cuda.get_device_name(device)).get(name, default)
        chosen = found if len(found) == len(default) else default
    if _requests is not None:
        _requests[name] = chosen
    return chosen


@contextmanager
def trying(trial: dict[str, Tile]) -> Iterator[None]:
    """Within this context these tiles go before all others."""
    global _trial
    before, _trial = _trial, trial
    try:
        yield
    finally:
        _trial = before


@contextmanager
def requests() -> Iterator[dict[str, Tile]]:
    """The tiles that kernels ask for within this context, each with the one that it runs with."""
    global _requests
    before, _requests = _requests, {}
    try:
        yield _requests
    finally:
        _requests = before


def path(gpu: str) -> Path:
    """The file with the tiles for a kind of GPU."""
    return cache_folder("tiles") / f"{re.sub('[^a-z0-9]+', '-', gpu.lower())}.json"


@cache
def stored(gpu: str) -> dict[str, Tile]:
    """The tiles that tuning found for a kind of GPU."""
    file = path(gpu)
    try:
        entries = json.loads(file.read_text())["tiles"]
        tiles = {name: tuple(entry) for name, entry in entries.items()}
        if not all(isinstance(size, int) and size > 0 for entry in tiles.values() for size in entry):
            raise ValueError("a tile is a list of positive whole numbers")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        logger.warning("ignoring the tiles in %s, run `quickvit tune` to renew them: %s", file, error)
        return {}
    return tiles


def store(gpu: str, tiles: dict[str, Tile]) -> Path:
    """Add tiles to the file for a kind of GPU."""
    file = path(gpu)
    file.parent.mkdir(parents=True, exist_ok=True)
    new = file.with_suffix(f".{os.getpid()}")
    new.write_text(json.dumps({"gpu": gpu, "tiles": {**stored(gpu), **tiles}}, indent=1))
    new.replace(file)
    stored.cache_clear()
    return file
