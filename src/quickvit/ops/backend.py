"""The one switch that decides which path an operation takes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from quickvit.group import D8, DihedralGroup

logger = logging.getLogger(__name__)

_FUSED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = find_spec("triton") is not None
_plain = False


@contextmanager
def plain() -> Iterator[None]:
    """Within this context every operation runs its definition in standard PyTorch operators.

    Use it to export a model to a runtime that knows no custom operators, or to check a fused path.
    """
    global _plain
    before, _plain = _plain, True
    try:
        yield
    finally:
        _plain = before


def is_plain() -> bool:
    """Whether operations must stay within standard PyTorch operators."""
    return _plain


def fused(x: Tensor, group: DihedralGroup) -> bool:
    """Whether the Triton kernels take `x`: D8 on a CUDA device, in a dtype they store."""
    if is_plain() or not x.is_cuda:
        return False
    choice = group == D8 and x.dtype in _FUSED_DTYPES and _HAS_TRITON
    if not torch.compiler.is_compiling():
        _log_choice(choice, str(group), str(x.dtype))
    return choice


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype that autocast wants for matrix products, as PyTorch's own operators do it."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


@cache
def _log_choice(choice: bool, group: str, dtype: str) -> None:
    path = "fused Triton kernels" if choice else "plain PyTorch operators"
    logger.info("%s layers in %s on CUDA use %s", group, dtype, path)
