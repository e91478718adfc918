"""Derived tensors that need computing only once while their parameter stays the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._guards import detect_fake_mode


class _Kept(NamedTuple):
    """A derived tensor and its version, the parameter that it is of, in which state, and on a CPU its values then."""

    tensor: Tensor
    version: int
    parameter: Tensor
    state: Hashable
    values: Tensor | None

    def is_of(self, parameter: Tensor, state: Hashable) -> bool:
        if self.parameter is not parameter or self.state != state or self.version != self.tensor._version:
            return False
        return self.values is None or torch.equal(self.values, parameter)


class DerivedTensor(nn.Module):
    """Base of layers that compute a tensor from one parameter, kept between forwards in evaluation.

    The kept tensor is never in the state dict. It is dropped by `train()` and `eval()`, and recomputed when the
    parameter was written to, replaced, moved or cast, or when somebody wrote to the tensor itself. On a GPU writes
    that PyTorch does not count, by way of `parameter.data` or by a fused optimizer, go unnoticed: to compare values
    would mean to wait for the device. Call `eval()` after them.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: _Kept | None = None

    def train(self, mode: bool = True) -> DerivedTensor:
        """Set the training mode and forget the derived tensor."""
        self._kept = None
        return super().train(mode)

    def _derive(self, parameter: Tensor, compute: Callable[[], Tensor], *key: Hashable) -> Tensor:
        """compute(), or what it gave before if parameter and key have not changed."""
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return compute()
        # Fake tensors are not for other calls. A CUDA graph would go on with what it was recorded with, whatever
        # becomes of the parameter.
        recorded = parameter.is_cuda and torch.cuda.is_current_stream_capturing()
        if recorded or detect_fake_mode() is not None:
            return compute()
        # What is no parameter is there for one call: a parametrization's result, say, or a traced argument.
        if not isinstance(parameter, nn.Parameter) or parameter.is_inference():
            return compute()
        state = (parameter.data_ptr(), parameter._version, parameter.dtype, *key)
        # Looked at once: another thread may keep another tensor at any time.
        kept = self._kept
        if kept is None or not kept.is_of(parameter, state):
            values = parameter.detach().clone() if parameter.is_cpu else None
            # PyTorch does not count who writes to tensors of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                tensor = compute()
            kept = self._kept = _Kept(tensor, tensor._version, parameter, state, values)
        return kept.tensor

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": None}
