"""Shared by all processes of a run: they end with their parent and stop on a signal."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent thread ends, even by kill -9 (Linux prctl).

    If `expected_parent` died before this call, the process ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if expected_parent is not None and os.getppid() != expected_parent:
        os._exit(1)


@contextmanager
def starting() -> Iterator[None]:
    """Turns garbage collection off inside, and excludes the objects made there from later collections: imports create a
    million of them, and collection among them takes a fifth of the start (benchmarks/startup.py).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def stop_event() -> threading.Event:
    """An event that SIGTERM or SIGINT sets. A second signal of the same kind has its default effect."""
    event = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # In a thread, because the interrupted main thread may hold the event's lock.
        threading.Thread(target=event.set, name="stop").start()
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return event
