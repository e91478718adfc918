"""The time of a kernel with tiles that `quickvit tune` may not come across, since it changes one number at a time.

    python benchmarks/tiles.py "weight gradient" 256,128,32,64,8,3,1 --sizes huge

prints a line for each operator that launches it: microseconds with the tile that it has now, then with others.
"""

import argparse

import torch

from quickvit.bench.operators import Operator, operators
from quickvit.bench.suite import COARSE
from quickvit.bench.timing import Settings, measure_ceilings
from quickvit.bench.tune import asked, timed
from quickvit.bench.work import Ceilings, Shape
from quickvit.ops.tiles import Tile


def tile(text: str) -> Tile:
    """Numbers that commas part."""
    return tuple(int(part) for part in text.split(","))


def main() -> None:
    """Print the times."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("kernel", help="the first words of its name in the file of `quickvit tune`")
    parser.add_argument("tiles", nargs="+", type=tile)
    parser.add_argument("--sizes", nargs="+", default=["large", "huge"])
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    settings = Settings(torch.device("cuda"), torch.bfloat16, options.batch, repeats=5)
    ceilings = measure_ceilings(settings)
    names = set()
    for size in options.sizes:
        shape = Shape(size, 16 if size in COARSE else 14)
        for operator in operators(shape, settings):
            launched = asked(operator, settings).items() if operator.name == "octic" else ()
            names |= {kernel for kernel, _ in launched}
            for kernel, now in launched:
                if kernel.startswith(options.kernel):
                    compare(
                        f"{size} {operator.label}", operator, kernel, now, options.tiles, settings, ceilings
                    )
    if not any(name.startswith(options.kernel) for name in names):
        parser.error(f"no kernel is called {options.kernel!r}; expected one of {', '.join(sorted(names))}")


def compare(
    place: str,
    operator: Operator,
    kernel: str,
    now: Tile,
    others: list[Tile],
    settings: Settings,
    ceilings: Ceilings,
) -> None:
    """Print the times of an operator, or that it does not run."""
    for other in others:
        if len(other) != len(now):
            raise SystemExit(f"a tile of {kernel!r} has {len(now)} numbers, as {now}; got {other}")
    found = timed(operator, kernel, [now, *others], settings, ceilings)
    times = (f"{found[t] * 1e3:.1f}" if t in found else "does not run" for t in (now, *others))
    print(
        f"{place}, {kernel}: {', '.join(f'{t} {time}' for t, time in zip((now, *others), times, strict=True))}"
    )


if __name__ == "__main__":
    main()
