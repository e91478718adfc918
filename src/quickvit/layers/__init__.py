"""Layers that commute with the group. Steerable tensors are packed: [..., C], see `quickvit.group.Layout`."""

from quickvit.layers.attention import OcticAttention
from quickvit.layers.block import OcticBlock, Pending
from quickvit.layers.depth import draw_subset, sample_scale
from quickvit.layers.dropout import OcticDropout
from quickvit.layers.folded import OcticFoldedBlock
from quickvit.layers.invariant import INVARIANTS, OcticInvariant
from quickvit.layers.lift import FreeLift, OcticLift
from quickvit.layers.linear import OcticLinear
from quickvit.layers.mlp import OcticMlp
from quickvit.layers.norm import OcticLayerNorm, OcticLayerScale
from quickvit.layers.position import OcticPosition
from quickvit.layers.standard import StandardAttention, StandardBlock
from quickvit.layers.tokens import InvariantTokens

__all__ = [
    "INVARIANTS",
    "FreeLift",
    "InvariantTokens",
    "OcticAttention",
    "OcticBlock",
    "OcticDropout",
    "OcticFoldedBlock",
    "OcticInvariant",
    "OcticLayerNorm",
    "OcticLayerScale",
    "OcticLift",
    "OcticLinear",
    "OcticMlp",
    "OcticPosition",
    "Pending",
    "StandardAttention",
    "StandardBlock",
    "draw_subset",
    "sample_scale",
]
