"""Models that are small enough to test everything on, and images for them."""

import torch
from torch import Tensor

from quickvit import QuickVisionTransformer
from quickvit.testing import randomize

TINY = {"embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 7, "patch_size": 4, "init_values": 1.0}


def tiny(family: str, **options) -> QuickVisionTransformer:
    """A model of four blocks for images of 16 pixels, with random weights."""
    return randomize(QuickVisionTransformer(**{**TINY, "img_size": 16, "family": family, **options}))


def images(model, *size, batch=4, dtype=torch.float64) -> Tensor:
    """Random images of the size of a model, or of this one."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(batch, model.in_chans, *(size or model.img_size), generator=generator).to(dtype)
