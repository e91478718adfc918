"""How kernels are launched from registered operators."""

import functools

import torch
from triton.runtime.jit import JITFunction


def traced(kernel):
    """The kernel, such that `torch.compile` sees it within an operator and launches it without Python.

    Triton's interpreter has kernels of another kind, which nothing needs to see.
    """
    return torch.library.wrap_triton(kernel) if isinstance(kernel, JITFunction) else kernel


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """How many programs, or multiples of them, fill this device."""
    if device.type != "cuda":
        return 1
    return torch.cuda.get_device_properties(device).multi_processor_count
