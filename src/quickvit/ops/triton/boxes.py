"""What the kernels for NVIDIA's Hopper share: tensors that are read and written in boxes, and where products are."""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
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
def factors(row_scale, row, count, LAYOUT: gl.constexpr):
    """What 64 tokens from a row on, of so many, are multiplied by: a column for products that lie as LAYOUT says."""
    token = row + gl.arange(0, 64, layout=gl.SliceLayout(1, LAYOUT))
    return gl.load(row_scale + token, mask=token < count, other=0.0)[:, None]


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
