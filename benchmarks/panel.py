"""fc1 and GELU, and q, k and v of H/14, on a Hopper: the kernel in CUDA beside what runs without it, and its parts.

    python benchmarks/panel.py [--sizes large huge giant e] [--columns 32 64] [--parts]

Prints microseconds of a call in a CUDA graph, and the error of the result over that of standard operators.
With --parts also what is left of the time without some of the work, by leaving it out of the source.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch

from quickvit.bench.timing import GraphedCalls, cuda_clock
from quickvit.ops import gelu, hopper, linear, mlp
from quickvit.ops.cuda import panel
from quickvit.ops.triton import hopper_heads

# Tokens of 64 images, channels and hidden features.
SIZES = {
    "large": (64 * 197, 1024, 4096),
    "huge": (64 * 257, 1280, 5120),
    "giant": (64 * 257, 1664, 8192),
    "e": (64 * 257, 1792, 15360),
    "q, k, v": (64 * 257, 1280, 3840),
}
LOADS = {
    "        ring.wait(turn);\n": "",
    "if (turn.number % CLUSTER == rank)": "if (row < 0)",
    "        barrier_wait(ring.empty + 8 * turn.slot, turn.phase ^ 1);\n": "",
    "        barrier_expect(full, whole ? BOX : BOX / WIDE * NARROW);\n": "",
}
PRODUCTS = {"wgmma<COLUMNS>(total": "if (left == 1) wgmma<COLUMNS>(total"}
# The results must still be needed, or the compiler leaves GELU out with the stores.
STORES = {
    "    if (row >= tokens || column >= F) return;": """
    u32 all = 0;
#pragma unroll
    for (int block = 0; block < 8; block++)
        all ^= results[block][0] ^ results[block][1] ^ results[block][2] ^ results[block][3];
    if (all != 0x12345679 || row >= tokens || column >= F) return;"""
}
GELU = {
    "            activate(y, mine": "            if (tokens < 0) activate(y, mine",
    "    barrier_wait(desk.empty, phase ^ 1);\n": "",
}
WITHOUT = {
    "loads": LOADS,
    "products": PRODUCTS,
    "stores": STORES,
    "GELU and stores": GELU,
    "loads, GELU and stores": LOADS | GELU,
    "loads and products": LOADS | PRODUCTS,
    "loads, products and stores": LOADS | PRODUCTS | STORES,
}


Run = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class Problem:
    """Weights of a size, and what is asked of a kernel for them."""

    def __init__(self, size: str) -> None:
        self.tokens, self.channels, self.width = SIZES[size]
        m, f = self.channels // 8, self.width // 8
        weights = torch.randn(4, f, m), torch.randn(1, 2 * f, 2 * m)
        one, two = ((w / w.shape[2] ** 0.5).cuda().bfloat16() for w in weights)
        self.parameters = one, two, torch.randn(f).cuda().bfloat16()

    def operands(self, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Random tokens, and a result that nobody has written."""
        x = torch.randn(tokens, self.channels, device="cuda").bfloat16()
        return x, x.new_full((tokens, self.width), float("nan"))

    def microseconds(self, run: Run) -> float:
        """The median time of a call."""

        def job() -> Callable[[], torch.Tensor]:
            x, y = self.operands(self.tokens)

            def call() -> torch.Tensor:
                run(x, *self.parameters, y)
                return y

            return call

        calls = GraphedCalls([job, job], 10)
        calls()
        return median(cuda_clock(calls, 5) / 10 for _ in range(7)) * 1e3

    def error(self, run: Run, tokens: int) -> float:
        """The error of some rows of the result over that of standard operators."""
        x, y = self.operands(tokens)
        run(x, *self.parameters, y)
        rows = torch.randperm(tokens, device="cuda")[:2000]
        x, y = x[rows], y[rows]
        one, two, bias = self.parameters
        exact = gelu.definition(linear.definition(x.double(), one.double(), two.double()), bias.double())
        plain = gelu.definition(linear.definition(x, one, two), bias)
        ours, theirs = ((result.double() - exact).norm().item() for result in (y, plain))
        return ours / theirs


def without(changes: dict[str, str]) -> Callable[..., str]:
    """The source with changes."""
    source = panel.source

    def changed(*arguments: object) -> str:
        text = source(*arguments)
        for old, new in changes.items():
            if old not in text:
                raise ValueError(f"the source has no {old!r}")
            text = text.replace(old, new)
        return text

    return changed


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES)[:4], default=list(SIZES)[:4])
    parser.add_argument("--columns", nargs="+", type=int, help="instead of the kernel's own choice")
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    source = panel.source
    for size in options.sizes:
        problem = Problem(size)
        for columns in options.columns or [panel.COLUMNS[problem.channels]]:
            panel.COLUMNS[problem.channels] = columns
            panel._kernel.cache_clear()
            time = problem.microseconds(panel.linear_gelu)
            counts = 1, 64, 197, 1023, problem.tokens
            errors = " ".join(f"{problem.error(panel.linear_gelu, count):.2f}" for count in counts)
            print(f"{size}: {columns} columns {time:.1f} us, errors {errors}", flush=True)
            for helpers, fetch in ((2, False), (3, True), (3, False)):
                panel.HELPERS, panel.FETCH = helpers, fetch
                panel._kernel.cache_clear()
                time = problem.microseconds(panel.linear_gelu)
                print(f"    {helpers} helpers, {'' if fetch else 'not '}fetched: {time:.1f} us", flush=True)
            panel.HELPERS, panel.FETCH = 2, True
            for name, changes in WITHOUT.items() if options.parts else ():
                panel.source = without(changes)
                panel._kernel.cache_clear()
                print(f"    without {name} {problem.microseconds(panel.linear_gelu):.1f} us", flush=True)
                panel.source = source
        hopper._gelu_kernel = lambda x, _: "hopper_gelu" if x.shape[1] <= 1280 else None
        print(f"    what runs without it {problem.microseconds(mlp.activate):.1f} us", flush=True)
    problem = Problem("q, k, v")
    for name, kernel in (("CUDA", panel), ("Gluon", hopper_heads)):
        time = problem.microseconds(lambda x, one, two, bias, _: kernel.linear_heads(x, one, two, bias))  # noqa: B023
        print(f"q, k, v of huge in heads, {name}: {time:.1f} us", flush=True)


if __name__ == "__main__":
    main()
