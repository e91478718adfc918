"""Whether the kernels for NVIDIA's Hopper, those in `triton/hopper*.py`, take a linear map or attention."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from quickvit.ops.precision import product_dtype

logger = logging.getLogger(__name__)

# Bytes of x and of the result from which on a kernel runs longer than Python needs to launch it.
LAUNCHED_BYTES = 2**29
# Entries of a feature from which on attention takes such kernels: those of 42 images at L/16.
MANY_ENTRIES = 2**23
# Tokens up to which a program of attention has one block of them, and half of its warps nothing to do.
FEW_TOKENS = 64


def takes(x: Tensor, width: int) -> bool:
    """Whether there is a kernel for a linear map of x to this width."""
    if not x.is_cuda:
        return False
    dtype = product_dtype(x.device) or x.dtype
    return _takes("hopper", x.device, dtype, x.shape[-1], width)


def takes_heads(x: Tensor, heads: int, tokens: int) -> bool:
    """Whether there are kernels for a linear map of x to q, k, v, for attention of so many tokens, and gradients."""
    if not x.is_cuda:
        return False
    dtype, channels = product_dtype(x.device) or x.dtype, x.shape[-1]
    if not _takes("hopper_heads", x.device, dtype, channels, heads):
        return False
    return tokens <= _most_tokens(x.device, dtype, channels // heads, True)


def takes_attention(q: Tensor, *, graded: bool) -> bool:
    """Whether kernels take attention of q, k, v [B, N, H, D], `graded` with its gradient: many long sequences."""
    if not q.is_cuda or not are_many(q.numel()):
        return False
    return FEW_TOKENS < q.shape[1] <= _most_tokens(q.device, q.dtype, q.shape[3], graded)


def are_many(entries: int) -> bool:
    """Whether a feature has so many entries that attention runs longer than Python takes to launch its kernels."""
    # Which is not asked of an exported model: it would be for as many images as its example.
    return not _is_exporting() and entries >= MANY_ENTRIES


@torch.compiler.assume_constant_result
def _is_exporting() -> bool:
    """PyTorch's own word, asked outside of its compiler: that of 2.11 says yes whatever it compiles for."""
    return torch.compiler.is_exporting()


def launches(x: Tensor, weight: Tensor, out: Tensor) -> bool:
    """Whether a kernel should write the map of x to `out`; if not, products of cuBLAS give the same result."""
    kind = "hopper", x.device, x.dtype, x.shape[1], out.shape[1]
    # Products of cuBLAS say what is wrong with operands of two types.
    if not x.is_cuda or weight.dtype != x.dtype or not _takes(*kind):
        return False
    if not _module("boxes").reachable(out):
        return False
    return _is_time((*kind, weight.stride(-1) == 1), x, out)


def launches_gelu(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, *, normed: bool = False
) -> bool:
    """Whether a kernel should write GELU of a map of x to `out`; if not, kernels one after the other."""
    kind = "hopper_gelu", x.device, x.dtype, x.shape[1], out.shape[1]
    if not x.is_cuda or weight.dtype != x.dtype or not _takes(*kind):
        return False
    return _is_time((*kind, None if bias is None else bias.dtype, normed), x, out)


def _is_time(kind: tuple[Hashable, ...], x: Tensor, out: Tensor) -> bool:
    """Whether to launch a kernel: Python takes longer for it than for what it replaces.

    That does not matter in a CUDA graph, nor with many tokens.
    """
    # The first call compiles it: later, a graph that is being captured would be in the way.
    first = kind not in _launched
    _launched.add(kind)
    return first or torch.cuda.is_current_stream_capturing() or x.nbytes + out.nbytes >= LAUNCHED_BYTES


_launched: set[tuple[Hashable, ...]] = set()


def kernels() -> ModuleType:
    """The kernel for a linear map."""
    return _module("hopper")


def gelu_kernels() -> ModuleType:
    """The kernel for a linear map and GELU."""
    return _module("hopper_gelu")


def attention_kernels() -> ModuleType:
    """The kernel for attention."""
    return _module("hopper_attention")


def gradient_kernels() -> ModuleType:
    """The kernel for the gradient of attention."""
    return _module("hopper_gradient")


def heads_kernels() -> ModuleType:
    """The kernel for a linear map to heads."""
    return _module("hopper_heads")


def _module(name: str) -> ModuleType:
    return import_module(f"quickvit.ops.triton.{name}")


@torch.compiler.assume_constant_result
def _takes(kernel: str, device: torch.device, dtype: torch.dtype, channels: int, width: int) -> bool:
    taken: bool = _is_known(device) and _module(kernel).takes(device, dtype, channels, width)
    return taken


@torch.compiler.assume_constant_result
def _most_tokens(device: torch.device, dtype: torch.dtype, dim: int, graded: bool) -> int:
    if not _is_known(device):
        return 0
    needed = (attention_kernels(), gradient_kernels()) if graded else (attention_kernels(),)
    return min(kernel.most_tokens(device, dtype, dim) for kernel in needed)


@cache
def _is_known(device: torch.device) -> bool:
    """Whether a device is a Hopper, and the language of the kernel that of the Triton at hand: releases differ."""
    # AMD's GPUs have such numbers, too.
    if torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    if find_spec("triton") is None:
        return False
    import triton

    known = (3, 6) <= tuple(int(part) for part in triton.__version__.split(".")[:2]) <= (3, 9)
    if not known:
        logger.warning(
            "the kernels for Hopper are for Triton 3.6 to 3.9, not %s: others run", triton.__version__
        )
    return known
