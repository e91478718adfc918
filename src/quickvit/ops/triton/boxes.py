"""What the kernels for NVIDIA's Hopper share: tensors in boxes, products, and how to divide work."""

from functools import cache, lru_cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# Their names in newer and in older releases of Triton.
load_box = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
store_box = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
_memory = gl.shared_memory_descriptor
view_as = getattr(_memory, "reinterpret", None) or _memory._reinterpret


@gluon.constexpr_function
def accumulators(columns):
    """Where the entries of a product of 64 rows are."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def nothing(COLUMNS: gl.constexpr):
    """A product of 64 rows to begin with."""
    return gl.zeros((64, COLUMNS), gl.float32, layout=accumulators(COLUMNS))


@gluon.jit
def wait_for(pending: gl.constexpr, totals):
    """For all but so many of the products that were begun, of which some are in `totals`."""
    if len(totals) > 1:
        result = warpgroup_mma_wait(pending, deps=totals)
    else:
        result = (warpgroup_mma_wait(pending, deps=totals),)
    return result


@gluon.constexpr_function
def parts_of(width, copies):
    """The columns of an irrep, or of `copies` of it, in powers of two: 160 in 128 + 32."""
    wide = 1 << (width.bit_length() - 1)
    return [copies * wide] if width == wide else [copies * wide, copies * (width - wide)]


@gluon.constexpr_function
def beside(shape, columns, transposed):
    """The shape of boxes of weights, or of transposed ones, as some of so many columns."""
    number, rows, inner = shape
    if transposed:
        return [number * inner // columns, rows, columns]
    return [number * rows // columns, columns, inner]


@gluon.jit
def share(count, longer, less, more):
    """The first of this program's small items, of which there are so many, and the first that is no longer one."""
    program = gl.program_id(0)
    first = min(program, longer) * less + max(program - longer, 0) * more
    last = first + (less if program < longer else more)
    return min(first, count), min(last, count)


@lru_cache(maxsize=4096)
def shares(large: int, small: int, cost: int, programs: int) -> tuple[int, int, int]:
    """How to end together with so many large and small items, of which a large one costs `cost` times as much.

    Large ones are dealt in turns. How many programs then have one more than the others, and how many small ones these
    and those have.
    """
    each, longer = divmod(large, programs)
    total = cost * each
    while True:
        total += 1
        less, more = max(total - cost * (each + 1), 0), total - cost * each
        if longer * less + (programs - longer) * more >= small:
            return longer, less, more


def in_boxes(tensor: torch.Tensor, shape: tuple[int, ...]) -> TensorDescriptor:
    """A tensor that is read or written in boxes of this shape; a copy if the hardware cannot read it where it is."""
    if not reachable(tensor):
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return TensorDescriptor.from_tensor(tensor, list(shape), _layout(shape, tensor.dtype))


def reachable(tensor: torch.Tensor) -> bool:
    """Whether the hardware can read and write a tensor where it is, in boxes."""
    *strides, last = tensor.stride()
    return tensor.data_ptr() % 16 == 0 and last == 1 and all(stride % 8 == 0 for stride in strides)


@cache
def _layout(shape: tuple[int, ...], dtype: torch.dtype) -> gl.NVMMASharedLayout:
    kind = gl.bfloat16 if dtype == torch.bfloat16 else gl.float16
    return gl.NVMMASharedLayout.get_default_for(list(shape), kind)
