"""Copies of tensors in another dtype, four in a launch."""

import torch
import triton
import triton.language as tl

from quickvit.ops.triton.launch import traced

# Entries and warps of a program.
TILE: tuple[int, int] = (4096, 4)
TOGETHER = 4


@triton.jit
def _copy(source, target, size, program, BLOCK: tl.constexpr):
    entry = program * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + entry, mask=entry < size)
    tl.store(target + entry, value.to(target.dtype.element_ty), mask=entry < size)


@triton.jit(do_not_specialize=["program_1", "program_2", "program_3"])
def _convert(
    source_0,
    source_1,
    source_2,
    source_3,
    target_0,
    target_1,
    target_2,
    target_3,
    size_0,
    size_1,
    size_2,
    size_3,
    program_1,
    program_2,
    program_3,
    BLOCK: tl.constexpr,
):
    """Of the tensors from the second on, `program` is the first program that copies it."""
    program = tl.program_id(0)
    if program < program_1:
        _copy(source_0, target_0, size_0, program, BLOCK)
    elif program < program_2:
        _copy(source_1, target_1, size_1, program - program_1, BLOCK)
    elif program < program_3:
        _copy(source_2, target_2, size_2, program - program_2, BLOCK)
    else:
        _copy(source_3, target_3, size_3, program - program_3, BLOCK)


def convert(tensors: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The contiguous tensors, all of one dtype, in another."""
    targets = [torch.empty(t.shape, dtype=dtype, device=t.device) for t in tensors]
    block, warps = TILE
    with torch.cuda.device_of(tensors[0]):
        for first in range(0, len(tensors), TOGETHER):
            sources, results = (some[first : first + TOGETHER] for some in (tensors, targets))
            more = TOGETHER - len(sources)
            # A tensor that is missing has no programs, for which any pointer will do.
            sizes = [*(t.numel() for t in sources), *more * [0]]
            ends = [sum(triton.cdiv(size, block) for size in sizes[:end]) for end in range(1, TOGETHER + 1)]
            if ends[-1]:
                pointers = *sources, *more * sources[:1], *results, *more * results[:1]
                traced(_convert)[(ends[-1],)](*pointers, *sizes, *ends[:-1], BLOCK=block, num_warps=warps)
    return targets
