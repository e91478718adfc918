"""Search for the tiles that the kernels run fastest with on this GPU."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from quickvit.bench.layers import layer_case
from quickvit.bench.operators import Operator, operators
from quickvit.bench.timing import Job, Settings, Timing, measure
from quickvit.bench.work import Ceilings, Shape
from quickvit.ops.tiles import Tile, requests, trying

logger = logging.getLogger(__name__)

# A tile must be this much faster than the one before to take its place.
GAIN = 0.98
MAX_STEPS = 4


@dataclass(frozen=True)
class Tuned:
    """The tile of a kernel before and after the search, with the milliseconds of its operator.

    before_ms: None if the kernel does not run with that tile on this GPU.
    """

    kernel: str
    before: Tile
    after: Tile
    before_ms: float | None
    after_ms: float


def tune(settings: Settings, ceilings: Ceilings, shapes: Sequence[Shape]) -> Iterator[Tuned]:
    """Tune the kernels of an octic block, from the tile they have now to better neighbours until there are none."""
    done: set[str] = set()
    for shape in shapes:
        for operator in operators(shape, settings):
            if operator.name == "octic":
                for kernel, tile in asked(operator, settings).items():
                    if kernel not in done:
                        done.add(kernel)
                        found = _search(operator, kernel, tile, settings, ceilings)
                        if found is not None:
                            yield found


def neighbours(tile: Tile) -> list[Tile]:
    """Tiles with one number halved or doubled, small ones also changed by one."""
    found = []
    for place, size in enumerate(tile):
        sizes = {size // 2, 2 * size} | ({size - 1, size + 1} if size <= 4 else set())
        found += [(*tile[:place], new, *tile[place + 1 :]) for new in sorted(sizes) if new > 0]
    return found


def asked(operator: Operator, settings: Settings) -> dict[str, Tile]:
    """The kernels that an operator launches, with their tiles."""
    with requests() as found:
        operator.build(settings)()
    return dict(found)


def _search(
    operator: Operator, kernel: str, tile: Tile, settings: Settings, ceilings: Ceilings
) -> Tuned | None:
    """None if the kernel runs neither with its tile nor with a neighbour."""
    times: dict[Tile, float] = {}
    best = tile
    for _ in range(MAX_STEPS):
        new = [candidate for candidate in (best, *neighbours(best)) if candidate not in times]
        times |= timed(operator, kernel, new, settings, ceilings)
        if not times:
            logger.warning(
                "%s runs neither with the tile %s nor with a neighbour, so it keeps it", kernel, tile
            )
            return None
        fastest = min(times, key=times.__getitem__)
        if best in times and times[fastest] > GAIN * times[best]:
            break
        best = fastest
    return Tuned(kernel, tile, best, times.get(tile), times[best])


def timed(
    operator: Operator, kernel: str, tiles: Sequence[Tile], settings: Settings, ceilings: Ceilings
) -> dict[Tile, float]:
    """Milliseconds of the operator with each tile; none for tiles that cannot be compiled or do not fit."""

    def build(tile: Tile) -> Job:
        job = operator.build(settings)

        def tried() -> object:
            with trying({kernel: tile}):
                return job()

        return tried

    cases = [
        layer_case(str(tile), partial(build, tile), operator.steps, settings, ceilings) for tile in tiles
    ]
    outcomes = measure(cases, settings, kernel)
    return {tile: outcome.ms for tile in tiles if isinstance(outcome := outcomes[str(tile)], Timing)}


def require_gpu(device: torch.device) -> str:
    """The name of the GPU, or a ValueError."""
    if device.type != "cuda":
        raise ValueError(f"only the kernels for a GPU have tiles; got the device {device}")
    return torch.cuda.get_device_name(device)
