"""The kernels of one block, by PyTorch's profiler.

    python benchmarks/kernels.py d8 --step forward --size large --patch 16

Models of two depths are profiled; what the deeper one has more is its blocks', and the rest is beside them. The first
half of an h8's or i8's blocks is octic.
"""

import argparse
from collections import Counter
from collections.abc import Callable
from functools import partial

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from quickvit.bench.dinov2 import dinov2_step
from quickvit.bench.models import inference, training
from quickvit.bench.timing import COMPILE, Job, Settings
from quickvit.bench.work import Shape

STEPS = 5
# What is profiled: passes without gradients, of blocks as they are or folded, one with gradients, a step of DINOv2's.
KINDS: dict[str, Callable[[str, Shape, Settings], Job]] = {
    "forward": inference,
    "folded": partial(inference, folded=True),
    "train": training,
    "dinov2": lambda family, shape, settings: dinov2_step(shape, settings, family),
}


def kernels(step: Job) -> tuple[Counter[str], Counter[str]]:
    """Microseconds and launches of each kernel in a step."""
    for _ in range(STEPS):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            times[event.name] += event.device_time / STEPS
            launches[event.name] += 1 / STEPS
    return times, launches


def main() -> None:
    """Print the kernels of a block, the longest first."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("family", help="vit, d8, i8 or h8")
    parser.add_argument("--step", default="dinov2", choices=KINDS)
    parser.add_argument("--size", default="huge")
    parser.add_argument("--patch", type=int, default=16)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--depths", type=int, nargs=2, default=(2, 4))
    parser.add_argument("--compile", default="blocks", choices=COMPILE)
    options = parser.parse_args()
    settings = Settings(torch.device("cuda"), torch.bfloat16, options.batch, options.compile)
    build = KINDS[options.step]
    found = [
        kernels(build(options.family, Shape(options.size, options.patch, depth=depth), settings))
        for depth in options.depths
    ]
    (few_times, few_launches), (times, launches) = found
    few, many = options.depths
    blocks = many - few
    rows = []
    for name in times:
        each = (times[name] - few_times[name]) / blocks
        count = (launches[name] - few_launches[name]) / blocks
        rows.append((each, count, times[name] - many * each, name))
    rows.sort(reverse=True)
    print(f"{'block µs':>9} {'launches':>9} {'rest µs':>9}")
    for each, count, rest, name in [(*map(sum, list(zip(*rows, strict=True))[:3]), "together"), *rows]:
        print(f"{each:9.1f} {count:9.1f} {rest:9.1f}  {name[:120]}")


if __name__ == "__main__":
    main()
