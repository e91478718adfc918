"""Derived tensors that need computing only once while their parameter stays the same."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn


class DerivedTensor(nn.Module):
    """Base of layers that compute a tensor from one parameter, kept between forwards in evaluation.

    The kept tensor is never in the state dict. It is dropped by `train()` and recomputed when the parameter was
    written to, replaced, moved or cast.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: tuple[Hashable, Tensor] | None = None

    def train(self, mode: bool = True) -> DerivedTensor:
        """Set the training mode and forget the derived tensor."""
        self._kept = None
        return super().train(mode)

    def _derive(self, parameter: Tensor, compute: Callable[[], Tensor], *key: Hashable) -> Tensor:
        """compute(), or what it gave before if parameter and key have not changed."""
        if (
            self.training
            or torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or parameter.is_inference()
        ):
            return compute()
        state = (id(parameter), parameter.data_ptr(), parameter._version, parameter.dtype, *key)
        if self._kept is None or self._kept[0] != state:
            self._kept = (state, compute())
        return self._kept[1]

    def __getstate__(self) -> dict[str, object]:
        return {**self.__dict__, "_kept": None}
