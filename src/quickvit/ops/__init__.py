"""The few operations that carry the time, each with a plain definition and, where it pays, a fused form.

Every function takes packed tensors (see `quickvit.group.Layout`) and picks its own path; callers never branch.
"""

from quickvit.ops.attention import octic_attention
from quickvit.ops.backend import plain
from quickvit.ops.gelu import octic_gelu
from quickvit.ops.linear import octic_linear
from quickvit.ops.norm import octic_layer_norm, octic_residual_norm

__all__ = [
    "octic_attention",
    "octic_gelu",
    "octic_layer_norm",
    "octic_linear",
    "octic_residual_norm",
    "plain",
]
