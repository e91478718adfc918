"""Attention of standard blocks, whose linear map leaves q, k and v of a token side by side.

On NVIDIA's Hopper heads of 80, and without gradients those of 104 and 112, have kernels of their own: PyTorch's round
them up to 128 entries.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from quickvit.group import D8
from quickvit.ops import hopper
from quickvit.ops.backend import fused, needs_grad
from quickvit.ops.operator import closed_operator
from quickvit.ops.packing import attend


def attention(qkv: Tensor, *, dropout: float = 0.0) -> Tensor:
    """softmax(q kᵀ / √D) v for every head, [B, N, 3, H, D] → [B, N, H, D]."""
    if not dropout and fused(qkv, D8) and hopper.takes_attention(qkv[:, :, 0], graded=needs_grad(qkv)):
        return _attention(qkv)[0]
    # Unpacked by iteration: of that a compiled graph writes the gradient once, of unbind twice.
    q, k, v = qkv.permute(2, 0, 1, 3, 4)
    return attend(q, k, v, dropout=dropout)


@closed_operator("head_attention")
def _attention(qkv: Tensor) -> tuple[Tensor, Tensor]:
    """The result, and for the gradient the logarithms of sums [B, H, N]."""
    result: tuple[Tensor, Tensor] = hopper.attention_kernels().attention_forward(*qkv.unbind(2), pairs=False)
    return result


@_attention.register_fake
def _(qkv):
    number, length, _, heads, dim = qkv.shape
    logs = qkv.new_empty(number, heads, length, dtype=torch.float32)
    return qkv.new_empty(number, length, heads, dim), logs


@closed_operator("head_attention_grad")
def _attention_grad(grad: Tensor, qkv: Tensor, out: Tensor, logs: Tensor) -> Tensor:
    """The gradient of q, k and v, as they lie."""
    result: Tensor = hopper.gradient_kernels().attention_backward(
        grad, qkv.contiguous(), out, logs, pairs=False
    )
    return result


@_attention_grad.register_fake
def _(grad, qkv, out, logs):
    return qkv.new_empty(qkv.shape)


def _setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad, _):
    return _attention_grad(grad, *ctx.saved_tensors)


_attention.register_autograd(_backward, setup_context=_setup)


@register_flop_formula(torch.ops.quickvit.head_attention)
def _flops(qkv, **__):
    number, length, _, heads, dim = qkv
    return 4 * number * length**2 * heads * dim


@register_flop_formula(torch.ops.quickvit.head_attention_grad)
def _grad_flops(grad, qkv, out, logs, **__):
    number, length, heads, dim = grad
    return 10 * number * length**2 * heads * dim
