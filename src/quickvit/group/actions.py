"""How the group acts on images, token grids and steerable features.

r turns by 90° anti-clockwise and s mirrors left to right, as in the paper; a non-square H × W becomes W × H under
a quarter turn. Only groups that map the pixel grid to itself act on images: the orders 2, 4 and 8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quickvit.group.dihedral import D8, DihedralGroup, Element
from quickvit.group.fourier import exact
from quickvit.group.layout import Layout


def quarter_turns(group: DihedralGroup) -> int:
    """How many quarter turns the generator r makes on a pixel grid."""
    if group.order not in (2, 4, 8):
        raise ValueError(f"{group} does not map a pixel grid to itself; use a group of order 2, 4 or 8")
    return 4 // group.rotations


def act_on_image(x: Tensor, g: Element, group: DihedralGroup = D8) -> Tensor:
    """ρ_image(g) on the last two axes, [..., H, W]."""
    x = torch.rot90(x, g.turns * quarter_turns(group), dims=(-2, -1))
    return x.flip(-1) if g.mirror else x


def act_on_grid(x: Tensor, g: Element, group: DihedralGroup = D8) -> Tensor:
    """ρ_token(g): moves the tokens of a grid [..., H, W, C] and leaves their channels alone."""
    return act_on_image(x.movedim(-1, 0), g, group).movedim(0, -1)


def act_on_features(x: Tensor, g: Element, group: DihedralGroup = D8) -> Tensor:
    """ρ_chan(g) on the channel axis of a packed tensor [..., C]; positions stay."""
    matrix = Layout(x.shape[-1], group).action_matrix(g).to(x)
    with exact(x):
        return (matrix @ x.unflatten(-1, (group.order, -1))).flatten(-2)


def act_on_tokens(
    x: Tensor,
    g: Element,
    grid: tuple[int, int],
    group: DihedralGroup = D8,
    *,
    prefix: int = 0,
    steerable: bool = True,
) -> Tensor:
    """The full action on a token sequence [B, prefix + H·W, C]: (ρ_token ⊗ ρ_chan)(g).

    Prefix tokens (class token, registers) have no place in the grid, so only their channels change. With
    steerable=False the channels are invariant and only the grid moves.
    """
    first, rest = x[..., :prefix, :], x[..., prefix:, :]
    rest = act_on_grid(rest.unflatten(-2, grid), g, group).flatten(-3, -2)
    x = torch.cat([first, rest], dim=-2)
    return act_on_features(x, g, group) if steerable else x
