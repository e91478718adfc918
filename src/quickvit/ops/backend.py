"""The one switch that decides which path an operation takes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.autograd import forward_ad

from quickvit.group import D8, DihedralGroup
from quickvit.ops.cpu import library

logger = logging.getLogger(__name__)

_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = find_spec("triton") is not None
# How many contexts ask for standard operators; threads may enter and leave theirs in any order.
_plain = 0


@contextmanager
def plain() -> Iterator[None]:
    """Within this context every operation runs its definition in standard PyTorch operators.

    Use it to export a model to a runtime that knows no custom operators, or to check a fused path.
    """
    global _plain
    _plain += 1
    try:
        yield
    finally:
        _plain -= 1


def is_plain() -> bool:
    """Whether operations must stay within standard PyTorch operators: within `plain`, and for what only those know.

    That is `torch.func`, vmap for example, and differentiation forwards.
    """
    transformed = torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0
    return transformed or bool(_plain)


def fused(x: Tensor, group: DihedralGroup) -> bool:
    """Whether hand-made kernels take `x`: those of Triton on a CUDA device, those in C on the CPU, for D8."""
    if is_plain() or not (x.is_cuda or x.is_cpu):
        return False
    choice = group == D8 and (_triton_takes(x) if x.is_cuda else _c_takes(x))
    if not torch.compiler.is_compiling():
        _log_choice(choice, str(group), str(x.dtype), x.device.type)
    return choice


def _triton_takes(x: Tensor) -> bool:
    return x.dtype in _FUSED_DTYPES and _runs_triton(x.device)


@torch.compiler.assume_constant_result
def _runs_triton(device: torch.device) -> bool:
    return _HAS_TRITON and _is_recent(device)


@cache
def _is_recent(device: torch.device) -> bool:
    """Whether a GPU has the shared memory that the kernels need: NVIDIA's from Ampere on."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _c_takes(x: Tensor) -> bool:
    # Under autocast the products, and what is between them, are in half precision.
    return x.dtype == torch.float32 and not torch.is_autocast_enabled("cpu") and library.available()


def needs_grad(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for a gradient of one of them."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


@cache
def _log_choice(choice: bool, group: str, dtype: str, device: str) -> None:
    fused_path = "Triton kernels" if device == "cuda" else "C kernels"
    path = fused_path if choice else "plain PyTorch operators"
    logger.info("%s layers in %s on %s use %s", group, dtype, device.upper(), path)
