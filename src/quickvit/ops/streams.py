"""Launches that do not wait for each other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

import torch


@contextmanager
def side_by_side(device: torch.device, lane: int = 0) -> Iterator[AbstractContextManager[object]]:
    """A context for launches that may run at the same time as the others of this one; at its end all have ended.

    So the end of one kernel, when it no longer fills the device, is the beginning of the other. In CUDA graphs only:
    elsewhere Python takes longer to say so than there is to gain. One within another takes another `lane`.
    """
    side = None if device.type != "cuda" else _side_stream(device, lane)
    if side is None or not torch.cuda.is_current_stream_capturing():
        yield nullcontext()
        return
    main = torch.cuda.current_stream(device)
    side.wait_stream(main)
    yield torch.cuda.stream(side)
    main.wait_stream(side)


@cache
def _side_stream(device: torch.device, lane: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
