"""Partial sums of weight gradients, on NVIDIA's Hopper.

    dW_ρ = Σ_t a_t b_tᵀ                    of some tokens, see `triton/weight_gradient.py`

A tile has 256 rows, of 64 to each of four groups of products, and all columns of b in an irrep of one dimension, or
half of those in E. Two programs share what they have in common, their rows in E and their columns in other irreps, so
that the tokens are read from the cache as rarely as there are registers for sums. They flow past in steps of 64.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch

from quickvit.ops.cuda import library
from quickvit.ops.cuda.panel import _KINDS, GROUPS, REST, _in_place, _products
from quickvit.ops.triton.launch import shared_memory

STEP, CLUSTER = 64, 2
# Of the narrower width: eighths for which there is a kernel.
WIDTHS = 128, 160, 208, 224


def _rows(b: int) -> int:
    """Of a tile."""
    return 128 if b > 208 else 256


def _slot(b: int) -> int:
    """Bytes of a step."""
    return 2 * STEP * (_rows(b) + -(-b // 64) * 64)


def _slots(b: int, limit: int) -> int:
    return (limit - REST) // _slot(b)


def source(dtype: torch.dtype, a: int, b: int, limit: int) -> str:
    """The kernel for a type and eighths of widths, and so much shared memory."""
    constants = {
        "A": a,
        "B": b,
        "HALF": int(dtype == torch.float16),
        "SLOTS": _slots(b, limit),
        "CLUSTER": CLUSTER,
    }
    general = """
template <int COLUMNS> __device__ void wgmma(
    float (&total)[COLUMNS / 2], unsigned left, unsigned right, unsigned upper, int more);
"""
    parts = [f"#define {name} {value}" for name, value in constants.items()]
    parts += [general, _products(b, _KINDS[dtype], transposed=True)]
    return "\n".join([*parts, *((library.FOLDER / name).read_text() for name in ("hopper.cuh", "sums.cu"))])


@cache
def _kernel(device: torch.device, dtype: torch.dtype, a: int, b: int) -> library.Kernel:
    limit = shared_memory(device)
    code, _ = library.compile_source(source(dtype, a, b, limit), torch.cuda.get_device_capability(device))
    return library.load(code, "sums", 128 * (GROUPS + 1), shared_bytes(b, limit), CLUSTER)


def shared_bytes(b: int, limit: int) -> int:
    """How much of so much shared memory a program uses."""
    return _slots(b, limit) * _slot(b) + REST


@cache
def takes(device: torch.device, dtype: torch.dtype, a: int, b: int) -> bool:
    """Whether there is a kernel for these eighths of widths, the second of which is the narrower."""
    known = b in WIDTHS and a % 8 == 0 and dtype in _KINDS and library.available()
    return known and _slots(b, shared_memory(device)) > 1


def items(a: int, b: int) -> int:
    """Into how many parts of equal cost the sums over some steps are divided."""
    rows = _rows(b)
    return 4 * -(-a // (CLUSTER * rows)) + 2 * -(-2 * a // rows)


def partial_sums(a: torch.Tensor, b: torch.Tensor, partial: torch.Tensor, steps: int) -> None:
    """Sums over so many steps of a[T, 8A] and b[T, 8B] after the other, to partial[slices, 12 A B]."""
    widths = a.shape[1] // 8, b.shape[1] // 8
    with torch.cuda.device_of(a):
        kernel = _kernel(a.device, a.dtype, *widths)
        boxes = [library.Boxes(_in_place(tensor), (STEP, 64)) for tensor in (a, b)]
        arguments: list[Any] = [library.Together(boxes), ctypes.c_void_p(partial.data_ptr())]
        arguments += [ctypes.c_int(count) for count in (len(a), steps)]
        kernel.launch(len(partial) * items(*widths), arguments)
