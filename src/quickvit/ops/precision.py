"""The dtype that autocast wants for matrix products, and how tensors get it."""

from __future__ import annotations

import torch
from torch import Tensor

from quickvit.ops.backend import is_plain
from quickvit.ops.operator import open_operator


def product_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of matrix products under autocast; None without it."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype that autocast wants for matrix products, as PyTorch's own operators do it."""
    dtype = product_dtype(tensors[0].device)
    return tensors if dtype is None else tuple(_cast(t, dtype) for t in tensors)


def autocast_weights(*weights: Tensor) -> tuple[Tensor, ...]:
    """The same for weights, which in compiled code on a GPU are converted together.

    They are small: each by itself takes longer to launch than to convert, and so do their gradients.
    """
    dtype = product_dtype(weights[0].device)
    if dtype is None or is_plain() or not (torch.compiler.is_compiling() and weights[0].is_cuda):
        return weights
    # Together with one that is trained, a frozen weight would be given a gradient.
    if any(w.dtype != torch.float32 for w in weights) or len({w.requires_grad for w in weights}) > 1:
        return tuple(_cast(w, dtype) for w in weights)
    return tuple(_convert([*weights], dtype))


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x if x.dtype == torch.float64 else x.to(dtype)


@open_operator("octic_convert")
def _convert(tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Copies of tensors of one dtype in another."""
    from quickvit.ops.triton.convert import convert

    return convert([t.contiguous() for t in tensors], dtype)


@_convert.register_fake
def _(tensors, dtype):
    return [t.new_empty(t.shape, dtype=dtype) for t in tensors]


def _setup(ctx, inputs, output) -> None:
    tensors, _ = inputs
    ctx.dtype = tensors[0].dtype


def _backward(ctx, grads):
    return _convert(grads, ctx.dtype), None


_convert.register_autograd(_backward, setup_context=_setup)
