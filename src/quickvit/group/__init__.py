"""The mathematics: dihedral groups, their irreps and Fourier transform, and how they act on tensors."""

from quickvit.group.actions import act_on_features, act_on_grid, act_on_image, act_on_tokens
from quickvit.group.dihedral import D2, D8, DihedralGroup, Element, Irrep
from quickvit.group.fourier import isotypic_to_regular, regular_to_isotypic
from quickvit.group.layout import Block, Layout
from quickvit.group.unfold import Unfolding

__all__ = [
    "D2",
    "D8",
    "Block",
    "DihedralGroup",
    "Element",
    "Irrep",
    "Layout",
    "Unfolding",
    "act_on_features",
    "act_on_grid",
    "act_on_image",
    "act_on_tokens",
    "isotypic_to_regular",
    "regular_to_isotypic",
]
