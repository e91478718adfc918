"""fc1 and GELU, and qkv and attention, on a Hopper: the kernel in CUDA beside what runs without it.

    python benchmarks/panel.py [--sizes base large huge giant e] [--parts]

Prints microseconds of a call in a CUDA graph, with 64 images, and the error of the result over that of standard
operators, for several numbers of tokens. With --parts also the time of other forms of the kernel, and what is left of
it without some of the work: that is left out of the source, and the result is wrong.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor

from quickvit.bench.timing import GraphedCalls, Job, cuda_clock
from quickvit.group import Layout
from quickvit.ops import attention, gelu, hopper, linear, mlp, self_attention
from quickvit.ops.cuda import panel
from quickvit.ops.triton.gelu import gelu_backward, gelu_forward
from quickvit.ops.triton.octets import from_octets

# Tokens of an image, channels and hidden features.
IMAGES = 64
SIZES = {
    "base": (197, 768, 3072),
    "large": (197, 1024, 4096),
    "huge": (257, 1280, 5120),
    "giant": (257, 1664, 8192),
    "e": (257, 1792, 15360),
}
COUNTS = 1, 64, 197, 1023
LOADS = {
    "        work.ring.wait(work.turn);\n": "",
    "if (turn.number % CLUSTER == rank)": "if (row < 0)",
    "        barrier_wait(ring.empty + 8 * turn.slot, turn.phase ^ 1);\n": "",
    "        barrier_expect(full, whole ? BOX : BOX / WIDE * NARROW);\n": "",
}
PRODUCTS = {"wgmma<WIDTH>(total": "if (left == 1) wgmma<WIDTH>(total"}
# What comes after products must still be needed, or the compiler leaves them out too.
AFTER = {"if (mine) finish(": "if (mine && tokens < 0) finish("}
STORES = {"y.store(tile, run, false);": "if (tile[0][run] == 0x12345679) y.store(tile, run, false);"}
FORMS = {
    "two turns ahead": {"AHEAD = 1": "AHEAD = 2"},
    "tokens not fetched early": {"            fetch_tokens(": "            if (row < 0) fetch_tokens("},
    "results kept by the cache": {'"l"(PASS)': '"l"(KEEP)'},
}
WITHOUT = {
    "loads": LOADS,
    "products": PRODUCTS,
    "what comes after": AFTER,
    "stores": STORES,
    "loads and what comes after": LOADS | AFTER,
    "loads and products": LOADS | PRODUCTS,
}


def noise(*shape: int) -> Tensor:
    """Random numbers whose product with as many others is of size 1."""
    return torch.randn(*shape, device="cuda").mul(shape[-1] ** -0.5).bfloat16()


def microseconds(call: Callable[[], object]) -> float:
    """The median time of a call, in a graph of ten."""

    def build() -> Job:
        return call

    calls = GraphedCalls([build], 10)
    calls()
    return 1e3 * median(cuda_clock(calls, 5) / 10 for _ in range(7))


@contextmanager
def sources(changes: dict[str, str]) -> Iterator[None]:
    """Within this context the kernel's source has changes."""
    original = panel.source

    def changed(*arguments: object) -> str:
        text = original(*arguments)
        for old, new in changes.items():
            if old not in text:
                raise ValueError(f"the source has no {old!r}")
            text = text.replace(old, new)
        return text

    panel.source = changed
    panel._kernel.cache_clear()
    try:
        yield
    finally:
        panel.source = original
        panel._kernel.cache_clear()


@contextmanager
def shape(channels: int, columns: int, cluster: int) -> Iterator[None]:
    """Within this context a panel has so many columns of each block, and so many programs share their tokens."""
    before = panel.COLUMNS[channels], panel.CLUSTERS[channels]
    panel.COLUMNS[channels], panel.CLUSTERS[channels] = columns, cluster
    panel._kernel.cache_clear()
    try:
        yield
    finally:
        panel.COLUMNS[channels], panel.CLUSTERS[channels] = before
        panel._kernel.cache_clear()


class Mlp:
    """fc1 and GELU of a size."""

    def __init__(self, size: str) -> None:
        length, self.channels, self.width = SIZES[size]
        m, f = self.channels // 8, self.width // 8
        self.x = noise(IMAGES * length, self.channels).mul(self.channels**0.5)
        self.weights, self.bias = (noise(4, f, m), noise(1, 2 * f, 2 * m)), noise(f)

    def run(self, tokens: int) -> Tensor:
        """The result for so many tokens, by the kernel that is the first to take them."""
        y = self.x.new_full((tokens, self.width), math.nan)
        # However few they are.
        hopper._launched.clear()
        mlp.activate(self.x[:tokens], *self.weights, self.bias, y)
        return y

    def time(self) -> float:
        """Microseconds."""
        y = self.x.new_empty(len(self.x), self.width)
        hopper._launched.clear()
        return microseconds(lambda: mlp.activate(self.x, *self.weights, self.bias, y))

    def error(self, tokens: int) -> float:
        """Over that of standard operators."""
        rows = torch.randperm(tokens, device="cuda")[:2000]
        found, x = self.run(tokens)[rows], self.x[rows]
        double = (w.double() for w in self.weights)
        exact = gelu.definition(linear.definition(x.double(), *double), self.bias.double())
        plain = gelu.definition(linear.definition(x, *self.weights), self.bias)
        ours, theirs = ((result.double() - exact).norm().item() for result in (found, plain))
        return ours / theirs

    def graded(self) -> dict[str, Callable[[], object]]:
        """What there is to time of a training step: with GELU what it is of, and its gradient through fc2."""
        m, f = self.channels // 8, self.width // 8
        down = noise(4, m, f), noise(1, 2 * m, 2 * f)
        hidden, y, grad = (self.x.new_empty(len(self.x), self.width) for _ in range(3))
        hidden.normal_()
        of_y = torch.randn_like(self.x)

        def apart() -> None:
            linear.products(self.x, *self.weights, hidden)
            gelu_forward(hidden, self.bias, y)

        def gradient_apart() -> None:
            linear.products(of_y, *(w.mT for w in down), grad)
            gelu_backward(grad, hidden, self.bias)

        return {
            "panel": lambda: panel.linear_gelu(self.x, *self.weights, self.bias, y, hidden=hidden),
            "products, then GELU": apart,
            "gradient, panel": lambda: panel.gelu_gradient(of_y, *(w.mT for w in down), hidden, grad),
            "gradient, products, then GELU's": gradient_apart,
        }


class Attention:
    """qkv and attention of a size."""

    def __init__(self, size: str) -> None:
        self.length, self.channels, _ = SIZES[size]
        self.heads, m = (12 if size == "base" else 16), self.channels // 8
        self.x = noise(IMAGES, self.length, self.channels).mul(self.channels**0.5)
        self.operands = noise(4, 3 * m, m), noise(1, 6 * m, 2 * m), noise(3 * m)

    @torch.no_grad()
    def today(self) -> Tensor:
        """By the way that is taken without octets."""
        one, two, bias = self.operands
        x, sizes = self.x.flatten(0, 1), (self.heads, [IMAGES], [self.length], None, 1.0)
        ways = {64: self_attention._self_attention, 80: self_attention._head_attention}
        if self.channels // self.heads in ways:
            return ways[self.channels // self.heads](x, *self.operands, *sizes)[0].view(self.x.shape)
        packed = linear.octic_linear(self.x, one, two)
        return attention.octic_attention(packed, self.heads, Layout(3 * self.channels), bias, overwrite=True)

    @torch.no_grad()
    def octets(self) -> Tensor:
        """By way of octets."""
        sizes = self.heads, [IMAGES], [self.length]
        y = self_attention._octet_attention(self.x.flatten(0, 1), *self.operands, *sizes, None, 1.0)
        return y.view(self.x.shape)

    def copy(self) -> Callable[[], None]:
        """Of a result from octets."""
        x = self.x.flatten(0, 1)
        y = torch.empty_like(x)
        return lambda: from_octets(x.view(len(x), -1, 8), y)


def forms(problem: Mlp) -> None:
    """Print times of other forms, and of parts."""
    channels, limit = problem.channels, panel.shared_memory(problem.x.device)
    for columns in (64, 48, 32):
        for cluster in (1, 2, 4):
            with shape(channels, columns, cluster):
                if panel._slots(channels, limit) > 2:
                    print(f"    {columns} columns, cluster of {cluster}: {problem.time():.1f}", flush=True)
    for title, named in (("", FORMS), ("without ", WITHOUT)):
        for name, changes in named.items():
            with sources(changes):
                print(f"    {title}{name}: {problem.time():.1f}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=list(SIZES))
    parser.add_argument("--parts", action="store_true")
    options = parser.parse_args()
    torch.manual_seed(0)
    kernels = hopper.GELU_KERNELS
    for size in options.sizes:
        problem = Mlp(size)
        for kernel in (*kernels, "products, then GELU"):
            hopper.GELU_KERNELS = (kernel,) if kernel in kernels else ()
            sizes = problem.x.device, problem.x.dtype, problem.channels, problem.width
            if kernel in kernels and not hopper._takes(kernel, *sizes):
                continue
            errors = " ".join(f"{problem.error(count):.2f}" for count in (*COUNTS, len(problem.x)))
            print(f"{size}, fc1 + GELU, {kernel}: {problem.time():.1f} us, errors {errors}", flush=True)
        hopper.GELU_KERNELS = ("panel",)
        if options.parts:
            forms(problem)
        hopper.GELU_KERNELS = kernels
        for name, call in problem.graded().items():
            print(f"{size}, fc1 + GELU in training, {name}: {microseconds(call):.1f} us", flush=True)
        other = Attention(size)
        print(f"{size}, qkv + attention: {microseconds(other.today):.1f} us", flush=True)
        x = other.x.flatten(0, 1)
        alone = microseconds(lambda: panel.linear_octets(x, *other.operands, other.heads))  # noqa: B023
        print(f"    qkv as octets {alone:.1f}, copy of a result {microseconds(other.copy()):.1f}", flush=True)
        if size not in ("base", "large"):
            difference = (other.octets() - other.today()).norm() / other.today().norm()
            print(f"    all {microseconds(other.octets):.1f}, difference {difference:.4f}", flush=True)


if __name__ == "__main__":
    main()
