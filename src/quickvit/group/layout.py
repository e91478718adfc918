"""Where each irrep lives in the channel axis of a packed steerable tensor."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quickvit.group.dihedral import D8, DihedralGroup, Element, Irrep


@dataclass(frozen=True)
class Block:
    """The channels of one component of one irrep."""

    irrep: Irrep
    component: int
    start: int
    stop: int

    @property
    def slice(self) -> slice:
        """The block as a slice of the channel axis."""
        return slice(self.start, self.stop)

    @property
    def width(self) -> int:
        """Number of channels."""
        return self.stop - self.start


@dataclass(frozen=True)
class Layout:
    """Channels of type (C/|G|) ρ_iso, ordered as in Figure 2 of the paper.

    For D8: A1 | A2 | B1 | B2 | E11 E21 | E12 E22, blocks of C/8, C/8, C/8, C/8, C/4, C/4. An irrep of dimension d
    occurs d times in each of the C/|G| copies of ρ_iso, and its d components are d neighbouring blocks.
    """

    channels: int
    group: DihedralGroup = D8

    def __post_init__(self) -> None:
        if self.channels <= 0 or self.channels % self.group.order:
            raise ValueError(
                f"the number of channels must be a positive multiple of {self.group.order}, the order of "
                f"{self.group}; got {self.channels}"
            )

    @property
    def copies(self) -> int:
        """Number of copies of ρ_iso, C/|G|; also the width of a one-dimensional irrep's block."""
        return self.channels // self.group.order

    @property
    def one_dim_channels(self) -> int:
        """Channels of all one-dimensional irreps together: they come first."""
        return self.group.num_one_dim * self.copies

    @property
    def gains(self) -> int:
        """Number of channels with the components of an irrep counted once: 3C/4 for D8."""
        return self.one_dim_channels + self.group.num_two_dim * 2 * self.copies

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks in the order of the channel axis."""
        blocks, start = [], 0
        for irrep in self.group.irreps:
            width = irrep.dim * self.copies
            for component in range(irrep.dim):
                blocks.append(Block(irrep, component, start, start + width))
                start += width
        return tuple(blocks)

    @property
    def invariant(self) -> slice:
        """The channels of A1, which no element changes."""
        return self.blocks[0].slice

    @property
    def paper_order(self) -> tuple[int, ...]:
        """For each of the |G| sub-tokens of this layout, its column in the paper's Q_reg.

        The paper writes Q_reg for E11, E12, E21, E22 (copy by copy); a block keeps one component of all copies.
        """
        order, column = [], 0
        for irrep in self.group.irreps:
            d = irrep.dim
            order += [column + copy * d + component for component in range(d) for copy in range(d)]
            column += d * d
        return tuple(order)

    def expand(self, gain: Tensor) -> Tensor:
        """One value per channel from one value per irrep channel, [..., gains] → [..., C].

        All components of an irrep must be scaled alike, or the scaling would not commute with the group.
        """
        one, two = gain[..., : self.one_dim_channels], gain[..., self.one_dim_channels :]
        if not self.group.num_two_dim:
            return one
        pairs = two.unflatten(-1, (self.group.num_two_dim, -1))
        doubled = pairs.unsqueeze(-2).expand(*pairs.shape[:-1], 2, pairs.shape[-1])
        return torch.cat([one, doubled.flatten(-3)], dim=-1)

    def embed_invariant(self, value: Tensor) -> Tensor:
        """A feature that is `value` on A1 and zero elsewhere, [..., C/|G|] → [..., C]."""
        return torch.nn.functional.pad(value, (0, self.channels - self.copies))

    def action_matrix(self, g: Element) -> Tensor:
        """ρ_chan(g) on one sub-token of every block, a |G| × |G| matrix in the order of this layout."""
        order = list(self.paper_order)
        return self.group.isotypic(g)[order][:, order]


@lru_cache(maxsize=256)
def packed_fourier_matrix(group: DihedralGroup) -> Tensor:
    """Q_reg with its columns in the order of a packed tensor: regular = Q @ isotypic, float64."""
    # It outlives the mode in which it is first asked for.
    with torch.inference_mode(False):
        return group.fourier_matrix[:, list(Layout(group.order, group).paper_order)]
