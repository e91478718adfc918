"""Functions that are registered with PyTorch as operators, and their hand-made kernels.

Operators let autograd, `torch.compile` and counters of FLOPs see what they need to know. That takes Python longer
than a small kernel runs, so where nobody looks a call goes straight to the function.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.library import custom_op, infer_schema, triton_op

Function = Callable[..., Any]


class _Calls(threading.local):
    straight = False


_calls = _Calls()


def is_straight() -> bool:
    """Whether the function that runs is closed to PyTorch: nobody needs to see what kernels it launches."""
    return _calls.straight


def seen(*arguments: Any) -> bool:
    """Whether PyTorch must see a call: to differentiate, trace or count it, or for a subclass of tensors."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return True
    graded = torch.is_grad_enabled()
    for argument in arguments:
        for tensor in argument if isinstance(argument, list) else (argument,):
            if isinstance(tensor, Tensor):
                plain = type(tensor) in (Tensor, torch.nn.Parameter)
                # Entries of negative ones (views of conjugates) are stored without their sign.
                if not plain or (graded and tensor.requires_grad) or tensor.is_neg():
                    return True
    return False


def written(*tensors: Tensor) -> None:
    """Say that a call past PyTorch has written to tensors: autograd must not take them for what it may have kept."""
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


class Operator:
    """A function of tensors, and the same as a registered operator. `writes`: to its first tensor, else to none."""

    def __init__(self, function: Function, registered: Any, writes: bool = False) -> None:
        self.function, self.registered, self.writes = straight(function), registered, writes

    def __call__(self, *arguments: Any) -> Any:
        """The function."""
        if seen(*arguments):
            return self.registered(*arguments)
        result = self.function(*arguments)
        if self.writes:
            written(arguments[0])
        return result

    def register_fake(self, function: Function) -> None:
        """What the result looks like."""
        self.registered.register_fake(function)

    def register_autograd(self, backward: Function, *, setup_context: Function) -> None:
        """How gradients are computed."""
        self.registered.register_autograd(backward, setup_context=setup_context)


class FusedOperator:
    """A function of tensors as two registered operators; a call takes the one for the device of its first tensor.

    quickvit::NAME launches Triton kernels and is open to `torch.compile`, which sees them. quickvit::NAME_cpu calls
    C kernels and is closed: nothing but the function's fake implementation is known of it.
    """

    def __init__(self, function: Function, name: str, mutates_args: Iterable[str]) -> None:
        opened = triton_op(f"quickvit::{name}", function, mutates_args=mutates_args)
        closed = custom_op(f"quickvit::{name}_cpu", function, mutates_args=mutates_args, device_types="cpu")
        self.gpu, self.cpu = (Operator(function, known, bool(mutates_args)) for known in (opened, closed))

    def __call__(self, x: Tensor, *arguments: Any) -> Any:
        """The function."""
        return (self.cpu if x.is_cpu else self.gpu)(x, *arguments)

    def register_fake(self, function: Function) -> None:
        """What the result looks like."""
        self.gpu.register_fake(function)
        self.cpu.register_fake(function)

    def register_autograd(self, backward: Function, *, setup_context: Function) -> None:
        """How gradients are computed."""
        self.gpu.register_autograd(backward, setup_context=setup_context)
        self.cpu.register_autograd(backward, setup_context=setup_context)


def fused_operator(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Function], FusedOperator]:
    """Register a function as a `FusedOperator`; it may write to its first tensor."""
    return lambda function: FusedOperator(function, name, mutates_args)


def open_operator(name: str) -> Callable[[Function], Operator]:
    """Register a function that launches Triton kernels, which `torch.compile` sees."""
    return lambda function: Operator(function, triton_op(f"quickvit::{name}", function, mutates_args=()))


def closed_operator(name: str, mutates_args: Iterable[str] = ()) -> Callable[[Function], Operator]:
    """Register a function that calls whatever it likes: `torch.compile` leaves it alone. It may write as above."""

    def register(function: Function) -> Operator:
        schema = infer_schema(function, mutates_args=mutates_args)
        closed = custom_op(f"quickvit::{name}", straight(function), mutates_args=mutates_args, schema=schema)
        return Operator(function, closed, bool(mutates_args))

    return register


def kernels(x: Tensor, name: str) -> ModuleType:
    """The module of this name with the kernels for the device of x."""
    return import_module(f"quickvit.ops.{'cpu' if x.is_cpu else 'triton'}.{name}")


def straight(function: Function) -> Function:
    """The function, which knows of itself that it is closed."""

    @wraps(function)
    def closed(*arguments: Any) -> Any:
        before, _calls.straight = _calls.straight, True
        try:
            return function(*arguments)
        finally:
            _calls.straight = before

    return closed
