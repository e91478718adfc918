"""The Fourier transform of the group on packed tensors, [..., C] → [..., C].

Isotypic tensors are packed as in `Layout`; regular tensors hold |G| blocks of C/|G| channels in the order of
`DihedralGroup.regular_order`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import sqrt

import torch
from torch import Tensor

from quickvit.group.dihedral import D8, DihedralGroup
from quickvit.group.layout import packed_fourier_matrix

SQRT2_OVER_2 = sqrt(2) / 2
SQRT2_OVER_4 = sqrt(2) / 4


def exact(x: Tensor) -> AbstractContextManager[object]:
    """A context in which products of tensors like x are as precise as x, under autocast too."""
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def isotypic_to_regular(x: Tensor, group: DihedralGroup = D8) -> Tensor:
    """Inverse Fourier transform, x ↦ Q_reg x."""
    blocks = x.unflatten(-1, (group.order, -1))
    if group.order == 2:
        return _sum_and_difference(blocks)
    if group != D8:
        with exact(x):
            return (packed_fourier_matrix(group).to(x) @ blocks).flatten(-2)
    a1, a2, b1, b2, e11, e21, e12, e22 = (SQRT2_OVER_4 * blocks).unbind(-2)
    a, b, c, d = a1 + a2, a1 - a2, b1 + b2, b1 - b2
    e, f, g, h = e11 + e12, e11 - e12, e21 + e22, e21 - e22
    apc, amc, bpd, bmd = a + c, a - c, b + d, b - d
    eph, emh, fpg, fmg = e + h, e - h, f + g, f - g
    turned = (apc + eph, amc + fmg, apc - eph, amc - fmg)
    mirrored = (bpd - fpg, bmd - emh, bpd + fpg, bmd + emh)
    return torch.cat(turned + mirrored, dim=-1)


def regular_to_isotypic(x: Tensor, group: DihedralGroup = D8) -> Tensor:
    """Fourier transform, x ↦ Q_regᵀ x."""
    blocks = x.unflatten(-1, (group.order, -1))
    if group.order == 2:
        return _sum_and_difference(blocks)
    if group != D8:
        with exact(x):
            return (packed_fourier_matrix(group).to(x).T @ blocks).flatten(-2)
    t0, t1, t2, t3, m0, m1, m2, m3 = (SQRT2_OVER_4 * blocks).unbind(-2)
    apc, eph, amc, fmg = t0 + t2, t0 - t2, t1 + t3, t1 - t3
    bpd, fpg, bmd, emh = m0 + m2, m2 - m0, m1 + m3, m3 - m1
    a, c, b, d = apc + amc, apc - amc, bpd + bmd, bpd - bmd
    e, h, f, g = eph + emh, eph - emh, fpg + fmg, fpg - fmg
    return torch.cat((a + b, a - b, c + d, c - d, e + f, g + h, e - f, g - h), dim=-1)


def _sum_and_difference(blocks: Tensor) -> Tensor:
    """Either transform of the group with two elements."""
    first, second = (SQRT2_OVER_2 * blocks).unbind(-2)
    return torch.cat((first + second, first - second), dim=-1)
