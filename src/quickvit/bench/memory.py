"""Peak memory of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from quickvit.bench.timing import Job


def build_and_weigh(build: Callable[[], Job], device: torch.device) -> tuple[Job, int]:
    """Build a job; also the bytes that it and all it owns hold at most during a call after the first.

    On a GPU the allocator tells. Elsewhere the storages of all tensors are followed from operator to operator,
    which does not see inside operators and compiled code.
    """
    if device.type == "cuda":
        return _weigh_cuda(build, device)
    with LiveStorages() as live:
        job = build()
        job()
        live.peak = 0
        job()
    return job, live.peak


def _weigh_cuda(build: Callable[[], Job], device: torch.device) -> tuple[Job, int]:
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    job = build()
    for _ in range(2):
        job()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    job()
    torch.cuda.synchronize(device)
    return job, torch.cuda.max_memory_allocated(device) - before


class LiveStorages(TorchDispatchMode):
    """Within this context, the bytes of all storages that operators made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._bytes: Any = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator and note the storages of its outputs."""
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self._note, result)
        self.peak = max(self.peak, sum(self._bytes.values()))
        return result

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._bytes[storage] = storage.nbytes()
        return tensor
