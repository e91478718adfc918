"""Operators that have hand-made kernels, registered with PyTorch once for the GPU and once for the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Function = Callable[..., Any]


class FusedOperator:
    """A function of tensors as two registered operators; a call takes the one for the device of its first tensor.

    quickvit::NAME launches Triton kernels and is open to `torch.compile`, which sees them. quickvit::NAME_cpu calls
    C kernels and is closed: nothing but the function's fake implementation is known of it.
    """

    def __init__(self, function: Function, name: str, mutates_args: Iterable[str]) -> None:
        self.gpu: Any = torch.library.triton_op(f"quickvit::{name}", function, mutates_args=mutates_args)
        self.cpu: Any = torch.library.custom_op(
            f"quickvit::{name}_cpu", function, mutates_args=mutates_args, device_types="cpu"
        )

    def __call__(self, x: Tensor, *arguments: Any) -> Any:
        """The function."""
        return self.cpu(x, *arguments) if x.is_cpu else self.gpu(x, *arguments)

    def register_fake(self, function: Function) -> None:
        """What the result looks like."""
        self.gpu.register_fake(function)
        self.cpu.register_fake(function)

    def register_autograd(self, backward: Function, *, setup_context: Function) -> None:
        """How gradients are computed."""
        self.gpu.register_autograd(backward, setup_context=setup_context)
        self.cpu.register_autograd(backward, setup_context=setup_context)


def fused_operator(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Function], FusedOperator]:
    """Register a function as a `FusedOperator`."""
    return lambda function: FusedOperator(function, name, mutates_args)


def kernels(x: Tensor, name: str) -> ModuleType:
    """The module of this name with the kernels for the device of x."""
    return import_module(f"quickvit.ops.{'cpu' if x.is_cpu else 'triton'}.{name}")
