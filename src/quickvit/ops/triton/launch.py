"""How kernels are launched from registered operators."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops import triton_kernel_wrap
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import JITFunction

from quickvit.ops.operator import is_straight


def traced(kernel):
    """The kernel, such that `torch.compile` sees it within an operator and launches it without Python.

    To be seen takes Python far longer than to launch (a millisecond, say PyTorch's sources), so in closed functions
    it is not. Triton's interpreter has kernels of another kind, which nothing needs to see.
    """
    if is_straight() or not isinstance(kernel, JITFunction):
        return kernel
    return torch.library.wrap_triton(kernel)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs, or multiples of them, fill this device."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count


@torch.compiler.assume_constant_result
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have."""
    if device.type != "cuda":
        return 2**20
    properties = torch.cuda.get_device_properties(device)
    # AMD's GPUs have no larger amount to ask for.
    return getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)


def _remembering(analyse: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch's analysis of what a launch reads and writes, done once for each of our kernels and kind of arguments.

    Its compiler asks several times about every launch in a graph, and each time translates the kernel anew, for 50
    ms: without a memory that is most of what compiling a model takes.
    """
    known: dict[Any, Any] = {}

    @functools.wraps(analyse)
    def remembering(kernel, kwargs, *rest):
        # A launch with a number of warps comes as a choice of one configuration, a new one each time.
        function = kernel.fn if isinstance(kernel, Autotuner) else kernel
        if not function.__module__.startswith("quickvit.") or any(rest):
            return analyse(kernel, kwargs, *rest)
        key = function, *((name, _kind(value)) for name, value in kwargs.items())
        if key not in known:
            known[key] = analyse(kernel, kwargs, *rest)
        return copy.deepcopy(known[key])

    return remembering


def _kind(value: Any) -> Any:
    """What an analysis can depend on: the type of a tensor, but the value of a constant."""
    if isinstance(value, bool | int | float | str | None):
        return value
    dtype = getattr(value, "dtype", None)
    return type(value), str(value.get_dtype() if hasattr(value, "get_dtype") else dtype)


# Its names in older and newer releases of PyTorch. Nothing is lost but time where it has another.
for _name in ("identify_mutated_tensors", "identify_accessed_tensors"):
    if hasattr(triton_kernel_wrap, _name):
        setattr(triton_kernel_wrap, _name, _remembering(getattr(triton_kernel_wrap, _name)))
