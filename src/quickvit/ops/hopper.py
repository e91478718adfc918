"""Whether the kernel for NVIDIA's Hopper, in `triton/hopper.py`, takes a linear map."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

# Bytes of x and of the result from which on the kernel runs longer than Python needs to launch it.
LAUNCHED_BYTES = 2**29


def takes(x: Tensor, width: int) -> bool:
    """Whether it takes a linear map of x to this width."""
    if not x.is_cuda:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return _takes(x.device, dtype, x.shape[-1], width)


def launches(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Whether it is what should write the map of x to `out`; if not, products of cuBLAS give the same result.

    Python takes longer to launch it than two products. That does not matter in a CUDA graph, nor with many tokens.
    """
    if (
        not x.is_cuda
        or not _takes(x.device, x.dtype, x.shape[1], out.shape[1])
        or not kernels().reachable(out)
    ):
        return False
    # The first call compiles it: later, a graph that is being captured would be in the way.
    kind = x.device, x.dtype, x.shape[1], out.shape[1], weight.stride(-1) == 1
    first = kind not in _launched
    _launched.add(kind)
    return first or torch.cuda.is_current_stream_capturing() or x.nbytes + out.nbytes >= LAUNCHED_BYTES


_launched: set[tuple[torch.device, torch.dtype, int, int, bool]] = set()


def kernels() -> ModuleType:
    """The kernels."""
    return import_module("quickvit.ops.triton.hopper")


@torch.compiler.assume_constant_result
def _takes(device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    taken: bool = _is_known(device) and kernels().takes(device, dtype, channels, width)
    return taken


@cache
def _is_known(device: torch.device) -> bool:
    """Whether a device is a Hopper, and the language of the kernel that of the Triton at hand: releases differ."""
    # AMD's GPUs have such numbers, too.
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    if find_spec("triton") is None:
        return False
    import triton

    return (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)
