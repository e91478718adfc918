"""Numbers that need no measurement: the cost of models, and all operations of a transformer block.

Beside the matrix products of a block, a multiplication, an addition, a division, a square root, an exponential and an
error function count one each. A MAC is two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from quickvit.bench.flops import Cost, Variant
from quickvit.group import D8

# Per element: mean, centring, squares and their sum, division, gain; a shift is counted apart.
NORM = 6
# ½x(1 + erf(x/√2)).
GELU = 5
# Per logit: scaling, subtraction of the largest, exponential, sum, division.
SOFTMAX = 5
# The paper's fast transform of D8 (lst:q_reg), per eight elements: 24 additions and 8 scalings.
FAST_FOURIER = (24 + 8) / 8
EXPANSION, HEAD_SIZE = 4, 64


@lru_cache
def model_cost(variant: Variant) -> Cost:
    """Parameters and MACs of a named model; tables and claims ask for the same ones."""
    return variant.cost()


@dataclass(frozen=True)
class BlockFlops:
    """FLOPs of a block for one image: of its matrix products, and of everything else."""

    products: float
    rest: float

    @property
    def total(self) -> float:
        """All operations."""
        return self.products + self.rest


def block_flops(width: int, tokens: int, *, octic: bool) -> BlockFlops:
    """A block C → 3C, attention, C → C, C → 4C, GELU, 4C → C, standard or octic."""
    hidden, heads = EXPANSION * width, width / HEAD_SIZE
    saving, share = (D8.flop_reduction, 1 / D8.order) if octic else (1.0, 1.0)
    linear = 2 * tokens * width * (3 * width + width + 2 * hidden) / saving
    attention = 4 * tokens**2 * width
    transforms = 2 * FAST_FOURIER if octic else 0
    rest = (
        2 * tokens * width * (NORM + share)  # norms, the shift on A1 only
        + share * tokens * (3 * width + width + hidden + width)  # biases
        + SOFTMAX * heads * tokens**2
        + tokens * hidden * (GELU + transforms)
        + 2 * 2 * tokens * width  # layer scale and residual sum
    )
    return BlockFlops(linear + attention, rest)
