"""Attention of heads of 80, 104 or 112: the kernels for Hopper beside PyTorch's, and copies to and from heads.

    python benchmarks/attention.py --images 64 --tokens 257 --dim 80

prints microseconds, each the median over CUDA graphs of ten launches. Heads of 80 also have their gradient.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quickvit.bench.timing import GraphedCalls, Job, cuda_clock
from quickvit.ops.linear import products
from quickvit.ops.triton.heads import into_heads, to_heads, to_packed
from quickvit.ops.triton.hopper_attention import attention_forward
from quickvit.ops.triton.hopper_gradient import attention_backward
from quickvit.ops.triton.hopper_heads import linear_heads

HEADS = 16
CALLS, REPEATS = 10, 7


def microseconds(build: Callable[[], Job]) -> float:
    """Of a call."""
    job = GraphedCalls([build], CALLS)
    return median(1e3 * cuda_clock(job, 3) / CALLS for _ in range(REPEATS))


def noise(*sizes: int) -> Tensor:
    """Random features."""
    return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)


def jobs(images: int, tokens: int, dim: int) -> dict[str, Callable[[], Job]]:
    """What is timed, by name."""
    shape, rows, channels = (images, tokens), images * tokens, HEADS * dim
    q, k, v = qkv = noise(*shape, 3, HEADS, dim).unbind(2)
    packed, bias, out = noise(rows, 3 * channels), noise(3 * channels // 8), noise(rows, channels)
    result = noise(*shape, HEADS, dim)

    def theirs() -> object:
        return scaled_dot_product_attention(*(x.transpose(1, 2) for x in qkv))

    return {
        "ours": lambda: lambda: attention_forward(q, k, v, pairs=False),
        "PyTorch's": lambda: theirs,
        "copy of q, k, v into heads": lambda: lambda: to_heads(packed, HEADS, 3, bias, shape, 0),
        "the same in place": lambda: lambda: into_heads(packed, HEADS, bias),
        "copy of a result from heads": lambda: lambda: to_packed([result], out, 0),
    }


def graded_jobs(images: int, tokens: int) -> dict[str, Callable[[], Job]]:
    """What heads of 80 have beside that: entries in pairs, and gradients."""
    shape, rows, channels = (images, tokens), images * tokens, HEADS * 80
    in_pairs, in_order = noise(3, *shape, HEADS, 80), noise(*shape, 3, HEADS, 80)
    dout, packed, out = noise(*shape, HEADS, 80), noise(rows, 3 * channels), noise(rows, channels)
    result, logs = attention_forward(*in_pairs, pairs=True)
    one, two = noise(4, 3 * channels // 8, channels // 8), noise(1, 3 * channels // 4, channels // 4)
    bias = noise(3 * channels // 8)

    def theirs() -> object:
        q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in in_order.unbind(2))
        return torch.autograd.grad(scaled_dot_product_attention(q, k, v), (q, k, v), dout.transpose(1, 2))

    return {
        "ours, in pairs": lambda: lambda: attention_forward(*in_pairs, pairs=True),
        "our gradient, in pairs": lambda: (
            lambda: attention_backward(dout, in_pairs, result, logs, pairs=True)
        ),
        "our gradient": lambda: lambda: attention_backward(dout, in_order, result, logs, pairs=False),
        "PyTorch's with its gradient": lambda: theirs,
        "q, k, v in pairs by our kernel": lambda: lambda: linear_heads(out, one, two, bias),
        "q, k, v in packed channels": lambda: lambda: products(out, one, two, packed),
        "copy of a gradient into heads": lambda: lambda: to_heads(out, HEADS, 1, None, shape, 0),
        "copy of gradients from heads": lambda: lambda: to_packed([*in_pairs], packed, 0),
    }


def main() -> None:
    """Print a line for each job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=257)
    parser.add_argument("--dim", type=int, default=80, choices=(80, 104, 112))
    options = parser.parse_args()
    chosen = jobs(options.images, options.tokens, options.dim)
    if options.dim == 80:
        chosen |= graded_jobs(options.images, options.tokens)
    for name, build in chosen.items():
        print(f"{microseconds(build):8.1f}  {name}")


if __name__ == "__main__":
    main()
