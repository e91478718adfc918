"""Attention of heads of 80, and its gradient: the kernels for Hopper beside PyTorch's, and copies to and from heads.

    python benchmarks/attention.py --images 64 --tokens 257

prints microseconds, each the median over CUDA graphs of ten launches.
"""

import argparse
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quickvit.bench.timing import GraphedCalls, Job, cuda_clock
from quickvit.ops.linear import products
from quickvit.ops.triton.heads import to_heads, to_packed
from quickvit.ops.triton.hopper_attention import attention_backward, attention_forward
from quickvit.ops.triton.hopper_heads import linear_heads

HEADS, DIM = 16, 80
CALLS, REPEATS = 10, 7


def microseconds(build: Callable[[], Job]) -> float:
    """Of a call."""
    job = GraphedCalls([build], CALLS)
    return median(1e3 * cuda_clock(job, 3) / CALLS for _ in range(REPEATS))


def jobs(images: int, tokens: int) -> dict[str, Callable[[], Job]]:
    """What is timed, by name."""
    shape, rows = (images, tokens), images * tokens

    def noise(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device="cuda", dtype=torch.bfloat16)

    q, k, v = in_pairs = noise(3, *shape, HEADS, DIM)
    in_order, dout = noise(*shape, 3, HEADS, DIM), noise(*shape, HEADS, DIM)
    qkv, bias, out = noise(rows, 3 * HEADS * DIM), noise(3 * HEADS * DIM // 8), noise(rows, HEADS * DIM)
    result, logs = attention_forward(in_pairs, pairs=True)
    one, two = (
        noise(4, 3 * HEADS * DIM // 8, HEADS * DIM // 8),
        noise(1, 3 * HEADS * DIM // 4, HEADS * DIM // 4),
    )

    def theirs(graded: bool) -> Job:
        def job() -> object:
            a, b, c = (x.transpose(1, 2).detach().requires_grad_(graded) for x in in_order.unbind(2))
            result = scaled_dot_product_attention(a, b, c)
            return torch.autograd.grad(result, (a, b, c), dout.transpose(1, 2)) if graded else result

        return job

    return {
        "ours": lambda: lambda: attention_forward(in_pairs, pairs=True),
        "ours, entries in order": lambda: lambda: attention_forward(in_order, pairs=False),
        "our gradient": lambda: lambda: attention_backward(dout, in_pairs, result, logs, pairs=True),
        "our gradient, entries in order": lambda: (
            lambda: attention_backward(dout, in_order, result, logs, pairs=False)
        ),
        "q, k, v in heads by our kernel": lambda: lambda: linear_heads(out, one, two, bias),
        "q, k, v in packed channels": lambda: lambda: products(out, one, two, qkv),
        "PyTorch's": lambda: theirs(False),
        "PyTorch's with its gradient": lambda: theirs(True),
        "copy of q, k, v into heads": lambda: lambda: to_heads(qkv, HEADS, 3, bias, shape, 0),
        "copy of a result from heads": lambda: lambda: to_packed([q], out, 0),
        "copy of a gradient into heads": lambda: lambda: to_heads(out, HEADS, 1, None, shape, 0),
        "copy of gradients from heads": lambda: lambda: to_packed([q, k, v], qkv, 0),
    }


def main() -> None:
    """Print a line for each job."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=257)
    options = parser.parse_args()
    for name, build in jobs(options.images, options.tokens).items():
        print(f"{microseconds(build):8.1f}  {name}")


if __name__ == "__main__":
    main()
