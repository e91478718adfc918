"""Octic blocks for inference: what norms and layer scales multiply by is in the weights beside them."""

from __future__ import annotations

import copy
from typing import Any, Final, Literal

import torch
from torch import Tensor

from quickvit.group import DihedralGroup, Layout
from quickvit.layers.block import OcticBlock, Pending
from quickvit.layers.hooks import are_called
from quickvit.layers.linear import OcticLinear
from quickvit.layers.norm import OcticLayerNorm, OcticLayerScale
from quickvit.ops import octic_attention, octic_linear
from quickvit.ops.backend import fused, needs_grad
from quickvit.ops.linear import linear_onto
from quickvit.ops.mlp import mlp_onto
from quickvit.ops.packing import Shapes
from quickvit.ops.precision import product_dtype
from quickvit.ops.rows import flat
from quickvit.ops.self_attention import octic_self_attention, takes_self_attention

# In the place of what is left to add: nothing is, but x is the next block's alone, which may overwrite it.
OWNED: Final = "owned"


class OcticFoldedBlock(OcticBlock):
    """An octic block that computes the same with fewer passes over the stream, without gradients on a GPU.

    A norm centres, divides by a number, multiplies by a gain and adds a shift; all but the number are linear:

        W (gain · (x − x̄)/σ + shift) + b  =  W′x/σ + b′,    W′ = W diag(gain) (1 − 11ᵀ/n),    b′ = b + W shift

    and layer scale γ makes γW of the weights after which it comes. What is left of a norm is 1/σ, one number for a
    token, which the next step finds and multiplies by, and residual sums are part of the products before them.
    Elsewhere, with gradients or hooks, it is an octic block whose norms have neither gain nor shift.
    """

    def __init__(self, block: OcticBlock) -> None:
        reason = _why_not(block)
        if reason is not None:
            raise ValueError(f"cannot fold this block: {reason}")
        attn, mlp, norm = block.attn, block.mlp, block.norm1
        width, weight = block.layout.channels, mlp.fc1.weight_1
        with torch.device("meta"):
            super().__init__(
                width,
                attn.num_heads,
                mlp.fc1.out_layout.channels / width,
                norm_eps=norm.eps * (norm.layout.group.order if norm.released else 1),
                released_norm=norm.released,
                group=norm.layout.group,
            )
        self.to(weight.dtype).to_empty(device=weight.device)
        for norm in (self.norm1, self.norm2):
            norm.reset_parameters()
            for name in ("weight", "bias"):
                # Neither trained nor saved: the path that needs no norm would not know of another value.
                value = getattr(norm, name).detach()
                delattr(norm, name)
                norm.register_buffer(name, value, persistent=False)
        # Macs have no double precision on their GPU.
        exact = copy.deepcopy(block).to("cpu" if weight.is_mps else weight.device, torch.float64)
        _fold(self.attn.qkv, exact.attn.qkv, norm=exact.norm1)
        _fold(self.attn.proj, exact.attn.proj, scale=exact.ls1)
        _fold(self.mlp.fc1, exact.mlp.fc1, norm=exact.norm2)
        _fold(self.mlp.fc2, exact.mlp.fc2, scale=exact.ls2)
        self.requires_grad_(False).train(block.training)

    def fuse(self) -> OcticFoldedBlock:
        """This block."""
        return self

    def forward(
        self,
        x: Tensor,
        pending: Pending | Literal["owned"] | None = None,
        *,
        defer: bool = False,
        shapes: Shapes | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """Apply the block; the arguments are those of `OcticBlock`."""
        if not self._saves_passes(x):
            pending = pending if isinstance(pending, Pending) else None
            return super().forward(x, pending, defer=defer, shapes=shapes)
        if pending is None:
            x = x.clone(memory_format=torch.contiguous_format)
        elif isinstance(pending, Pending):
            x = self.add(x, pending)
        tokens, norm = flat(x), self.norm2
        proj, fc1, fc2 = self.attn.proj, self.mlp.fc1, self.mlp.fc2
        linear_onto(tokens, self._heads(tokens.view(x.shape), shapes), *proj.weights, proj.bias)
        mlp_onto(tokens, norm.eps, norm.pair_weight, *fc1.weights, fc1.bias, *fc2.weights, fc2.bias)
        x = tokens.view(x.shape)
        return (x, OWNED) if defer else x

    def _heads(self, x: Tensor, shapes: Shapes | None) -> Tensor:
        attn, qkv, norm = self.attn, self.attn.qkv, self.norm1
        if takes_self_attention(x, attn.num_heads, self.layout.group, shapes):
            number = norm.eps, norm.pair_weight
            heads = octic_self_attention(
                x, *qkv.weights, qkv.bias, attn.num_heads, shapes=shapes, norm=number
            )
        else:
            packed = octic_linear(norm(x), *qkv.weights)
            heads = octic_attention(
                packed, attn.num_heads, attn.qkv_layout, qkv.bias, shapes=shapes, overwrite=True
            )
        return flat(heads)

    def _saves_passes(self, x: Tensor) -> bool:
        """Whether there are kernels, and nobody needs what lies between the steps."""
        if not _has_kernels(x, self.layout.group) or are_called(*self.children()):
            return False
        parameters = [*self.parameters()]
        alike = product_dtype(x.device) is None and all(p.dtype == x.dtype for p in parameters)
        return alike and not self.training and not needs_grad(x, *parameters)


def _has_kernels(x: Tensor, group: DihedralGroup) -> bool:
    return x.is_cuda and fused(x, group)


def _why_not(block: OcticBlock) -> str | None:
    if are_called(*block.children()):
        return "one of its layers has a hook, or was replaced"
    if any("parametrizations" in module._modules for module in block.modules()):
        return "its weights are computed by a parametrization"
    return None


@torch.no_grad()
def _fold(
    target: OcticLinear,
    source: OcticLinear,
    norm: OcticLayerNorm | None = None,
    scale: OcticLayerScale | None = None,
) -> None:
    """The weights of a linear map with those of the norm before it, and of the layer scale after it."""
    one, two = source.weights
    bias = one.new_zeros(one.shape[1]) if source.bias is None else source.bias
    if norm is not None:
        bias = bias + one[0] @ norm.bias
        of_one, of_two = _of_irreps(norm.weight, norm.layout)
        one, two = one * of_one.unsqueeze(1), two * of_two.unsqueeze(1)
        one, two = (weight - weight.mean(2, keepdim=True) for weight in (one, two))
    if scale is not None:
        of_one, of_two = _of_irreps(scale.gamma, scale.layout)
        one, two, bias = one * of_one.unsqueeze(2), two * of_two.unsqueeze(2), bias * of_one[0]
    assert target.bias is not None
    for parameter, value in zip((*target.weights, target.bias), (one, two, bias), strict=True):
        parameter.copy_(value)


def _of_irreps(gains: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Gains as those of the one-dimensional irreps, [n1, C/|G|], and of the two-dimensional ones, [n2, 2C/|G|]."""
    one, two = gains.split([layout.one_dim_channels, layout.gains - layout.one_dim_channels])
    return one.unflatten(0, (-1, layout.copies)), two.unflatten(0, (-1, 2 * layout.copies))
