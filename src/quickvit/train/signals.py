"""Requests to stop: signals that are answered at the end of a step."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

# What schedulers send before they end a job (SIGUSR2 is submitit's), and Ctrl-C; as far as the system has them.
_NAMES = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT")
SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
EXIT_REQUEUE = 75
"""The exit code of a run that was asked to stop, saved its state and wants to be started again; EX_TEMPFAIL."""


class StopRequest:
    """The signal that asked to stop, if one did."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None

    def __bool__(self) -> bool:
        return self.received is not None

    def _receive(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = signal.Signals(number)


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Note signals instead of dying from them; a second Ctrl-C interrupts at once."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        # Only the main thread may say what signals do; elsewhere they keep doing what they did.
        yield request
        return
    before = {number: signal.signal(number, request._receive) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
