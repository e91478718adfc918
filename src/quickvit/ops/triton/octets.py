"""Features as octets: the eight entries that the blocks of a packed feature have at one place, side by side.

A feature [T, C/8, 8] in octets has at place i entry i of A1 A2 B1 B2, entries 2i and 2i + 1 of the first component
of E, and those of the second. A head's entries lie side by side in it too: a head has neighbouring channels of each
irrep, of E twice as many. They have the same order in q, k and v, and attention does not see which. A kernel that
multiplies for all blocks can write 32 bytes at once, whatever the size of a head.
"""

import torch
import triton
import triton.language as tl

from quickvit.ops.triton.launch import traced

# Pairs of octets of a program, and warps.
_TILE = 256, 4


@triton.jit
def _from_octets(octets, packed, pairs, M: tl.constexpr, PAIRS: tl.constexpr):
    """Packed channels of pairs of neighbouring octets, of which there are M / 2 in a token."""
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    inside = (pair < pairs)[:, None]
    source = octets + pair[:, None] * 16 + tl.arange(0, 16)[None, :]
    values = tl.load(source, mask=inside, other=0.0).reshape([PAIRS, 2, 2, 2, 2])
    # The neighbours last: each thread has both, and writes them side by side.
    low, high = tl.split(values.permute([0, 1, 3, 4, 2]))
    even, odd = tl.split(low)
    a1, b1 = tl.split(even)
    a2, b2 = tl.split(odd)
    even, odd = tl.split(high)
    e11, e12 = tl.split(even)
    e21, e22 = tl.split(odd)
    token, place = pair // (M // 2), pair % (M // 2) * 2
    start = packed + (token * (8 * M) + place)[:, None] + tl.arange(0, 2)[None, :]
    tl.store(start, a1, mask=inside)
    tl.store(start + M, a2, mask=inside)
    tl.store(start + 2 * M, b1, mask=inside)
    tl.store(start + 3 * M, b2, mask=inside)
    start = packed + (token * (8 * M) + 4 * M + 2 * place)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(start, tl.join(e11, e21).reshape([PAIRS, 4]), mask=inside)
    tl.store(start + 2 * M, tl.join(e12, e22).reshape([PAIRS, 4]), mask=inside)


def from_octets(octets: torch.Tensor, packed: torch.Tensor) -> None:
    """A feature [T, C/8, 8] in octets written to packed[T, C]."""
    m = octets.shape[1]
    pairs = octets.shape[0] * m // 2
    if pairs:
        size, warps = _TILE
        with torch.cuda.device_of(octets):
            traced(_from_octets)[(triton.cdiv(pairs, size),)](
                octets, packed, pairs, M=m, PAIRS=size, num_warps=warps
            )
