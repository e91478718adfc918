"""The lift: patch embedding from images to steerable tokens."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from quickvit.group import D8, DihedralGroup, Layout, Unfolding
from quickvit.layers.cache import DerivedTensor

# Bytes that rows of operands should be multiples of on a GPU.
ALIGNMENT = 16


def embed_patches(x: Tensor, kernel: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of images [B, in, H, W] with a kernel [C, in, P, P] at stride P, as tokens [B, H/P, W/P, C].

    It is a matrix product over pixels that no two patches share; on a GPU that is ten times as fast as the
    convolution.
    """
    size = kernel.shape[-1]
    pixels = x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).permute(0, 2, 4, 1, 3, 5)
    if x.is_cuda and kernel[0].numel() * kernel.element_size() % ALIGNMENT:
        # Rows of odd length would keep the product from the fast kernels.
        padding = (0, -size % 8)
        pixels, kernel = functional.pad(pixels, padding), functional.pad(kernel, padding)
    return functional.linear(pixels.flatten(3), kernel.flatten(1), bias)


class OcticLift(DerivedTensor):
    """A convolution with stride P whose kernels are steerable: images [B, in, H, W] → tokens [B, H/P, W/P, C].

    The kernel of each irrep is unfolded by symmetry from a free corner, weight [6, C/8, in, ⌈P/2⌉, ⌈P/2⌉] for D8;
    the bias [C/8] acts on A1.
    """

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int, group: DihedralGroup = D8) -> None:
        super().__init__()
        self.layout = Layout(embed_dim, group)
        self.patch_size = patch_size
        self.unfold = Unfolding((patch_size, patch_size), group)
        shape = (self.unfold.num_corners, self.layout.copies, in_chans, *self.unfold.corner_size)
        self.weight = nn.Parameter(torch.empty(shape))
        self.bias = nn.Parameter(torch.empty(self.layout.copies))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Weights such that the unfolded kernel has the mean square of a standard convolution, 1/(3 fan_in)."""
        fan_in = self.weight.shape[2] * self.patch_size**2
        bound = self.unfold.gain * fan_in**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -(fan_in**-0.5), fan_in**-0.5)

    def kernel(self) -> Tensor:
        """The unfolded kernel [C, in, P, P]."""
        return self._derive(self.weight, lambda: self.unfold(self.weight))

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches of x."""
        return embed_patches(x, self.kernel(), self.layout.embed_invariant(self.bias))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> OcticLift:
        def on_kernels(tensor: Tensor) -> Tensor:
            try:
                return fn(tensor)
            except RuntimeError:
                if tensor.ndim != 5:
                    raise
                # Of to(memory_format=torch.channels_last), which is for tensors of four dimensions.
                return fn(tensor.flatten(0, 1)).unflatten(0, tensor.shape[:2])

        super()._apply(on_kernels, recurse)
        return self

    def extra_repr(self) -> str:
        """Patch size and width."""
        return f"patch_size={self.patch_size}, embed_dim={self.layout.channels}, group={self.layout.group}"


class FreeLift(nn.Module):
    """The lift without its symmetry constraint, the ablation of the paper: a plain convolution."""

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.conv = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)

    def kernel(self) -> Tensor:
        """The kernel [C, in, P, P]."""
        return self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        """Embed the patches of x, [B, in, H, W] → [B, H/P, W/P, C]."""
        return embed_patches(x, self.conv.weight, self.conv.bias)
