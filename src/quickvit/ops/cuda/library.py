"""CUDA without a compiler on the machine: NVIDIA's run-time compiler comes with PyTorch, the driver with the GPU."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

FOLDER = Path(__file__).parent
# Names of the driver's interface: CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, CU_TENSOR_MAP_…
_SHARED_BYTES = 8
_DATA_TYPES = {torch.float16: 6, torch.bfloat16: 9}
_SWIZZLES = {32: 1, 64: 2, 128: 3}
_PROMOTE_TO_128_BYTES = 2
# A descriptor of boxes takes so many bytes, and begins at a multiple of the others.
_DESCRIPTOR, _ALIGNMENT = 128, 64


class CudaError(RuntimeError):
    """What NVIDIA's compiler or driver has to say."""


@cache
def available() -> bool:
    """Whether there is a run-time compiler."""
    try:
        _compiler()
    except OSError as error:
        logger.info("no CUDA kernels: %s", error)
        return False
    return True


@cache
def _compiler() -> ctypes.CDLL:
    if torch.version.cuda is None:
        raise OSError("PyTorch is not built for CUDA")
    name = f"libnvrtc.so.{torch.version.cuda.split('.')[0]}"
    try:
        return ctypes.CDLL(name)
    except OSError:
        # PyTorch's wheels have it in packages of their own, beside PyTorch.
        packages = Path(torch.__file__).parents[1] / "nvidia"
        for path in sorted(packages.glob(f"*/lib/{name}")):
            return ctypes.CDLL(str(path))
        raise


def compile_source(source: str, capability: tuple[int, int]) -> tuple[bytes, str]:
    """Machine code of a source for a compute capability, with what is its own, and what the compiler says of it."""
    compiler = _compiler()
    program = ctypes.c_void_p()
    _check(
        compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None), "compiler"
    )
    try:
        major, minor = capability
        options = [f"--gpu-architecture=sm_{major}{minor}a".encode(), b"--std=c++17", b"--ptxas-options=-v"]
        status = compiler.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*options)
        )
        log = _text(compiler.nvrtcGetProgramLogSize, compiler.nvrtcGetProgramLog, program).decode()
        if status:
            raise CudaError(log)
        return _text(compiler.nvrtcGetCUBINSize, compiler.nvrtcGetCUBIN, program), log
    finally:
        compiler.nvrtcDestroyProgram(ctypes.byref(program))


def _text(size, read, program: ctypes.c_void_p) -> bytes:
    count = ctypes.c_size_t()
    _check(size(program, ctypes.byref(count)), "compiler")
    buffer = ctypes.create_string_buffer(count.value)
    _check(read(program, buffer), "compiler")
    return buffer.raw


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        raise CudaError(f"NVIDIA's {what} reports error {status}")


@dataclass(frozen=True)
class Kernel:
    """A function on one GPU, whose programs have so many threads and so much shared memory for their own use.

    They come in clusters, of which so many can run at the same time.
    """

    handle: ctypes.c_void_p
    threads: int
    shared: int
    cluster: int
    most: int

    def launch(self, clusters: int, arguments: Sequence[ctypes._SimpleCData[Any] | Together]) -> None:
        """Run so many clusters of programs on PyTorch's stream."""
        pointers = (ctypes.c_void_p * len(arguments))(*(_address(argument) for argument in arguments))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        sizes = clusters * self.cluster, 1, 1, self.threads, 1, 1, self.shared
        _check(_driver().cuLaunchKernel(self.handle, *sizes, stream, pointers, None), "driver")


class _Launch(ctypes.Structure):
    """The driver's CUlaunchConfig."""

    _fields_ = [
        *(
            (name, ctypes.c_uint)
            for name in ("grid", "grid_y", "grid_z", "threads", "threads_y", "threads_z")
        ),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    ]


def load(code: bytes, name: str, threads: int, shared: int, cluster: int) -> Kernel:
    """A function of machine code, on the current GPU."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    # PyTorch has made the GPU's context by now, or does it here.
    torch.cuda.current_stream().synchronize()
    _check(_driver().cuModuleLoadData(ctypes.byref(module), code), "driver")
    _check(_driver().cuModuleGetFunction(ctypes.byref(function), module, name.encode()), "driver")
    _check(_driver().cuFuncSetAttribute(function, _SHARED_BYTES, shared), "driver")
    most, config = ctypes.c_int(), _Launch(cluster, 1, 1, threads, 1, 1, shared)
    _check(
        _driver().cuOccupancyMaxActiveClusters(ctypes.byref(most), function, ctypes.byref(config)), "driver"
    )
    return Kernel(function, threads, shared, cluster, most.value)


class Boxes:
    """A tensor that kernels read in boxes, whose rows lie swizzled in shared memory. It may lie in any strides."""

    def __init__(self, tensor: Tensor, box: Sequence[int]) -> None:
        rank, item = tensor.ndim, tensor.element_size()
        self.memory = ctypes.create_string_buffer(_DESCRIPTOR + _ALIGNMENT)
        self.address = -(-ctypes.addressof(self.memory) // _ALIGNMENT) * _ALIGNMENT
        status = _driver().cuTensorMapEncodeTiled(
            ctypes.c_void_p(self.address),
            _DATA_TYPES[tensor.dtype],
            rank,
            ctypes.c_void_p(tensor.data_ptr()),
            (ctypes.c_uint64 * rank)(*reversed(tensor.shape)),
            (ctypes.c_uint64 * (rank - 1))(*(item * stride for stride in reversed(tensor.stride()[:-1]))),
            (ctypes.c_uint32 * rank)(*reversed(box)),
            (ctypes.c_uint32 * rank)(*rank * [1]),
            0,
            _SWIZZLES[box[-1] * item],
            _PROMOTE_TO_128_BYTES,
            0,
        )
        _check(status, "driver")


class Together:
    """Boxes as one argument."""

    def __init__(self, boxes: Sequence[Boxes]) -> None:
        content = b"".join(ctypes.string_at(each.address, _DESCRIPTOR) for each in boxes)
        self.memory = ctypes.create_string_buffer(content, len(content))
        self.address = ctypes.addressof(self.memory)


def _address(argument: ctypes._SimpleCData[Any] | Together) -> int:
    return argument.address if isinstance(argument, Together) else ctypes.addressof(argument)
