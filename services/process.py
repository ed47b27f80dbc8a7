"""Shared by all processes of a run: they end with their parent, stop on a signal, and report errors in one line."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from tandem.protos.errors import TandemError, UserError
from tandem.protos.extras import missing_extra_named

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
    """Turns garbage collection off inside, and excludes the objects made there from later collections.

    Imports create a million long-lived objects. Garbage collection among them takes a fifth of the start
    (benchmarks/startup.py).
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def stop_event() -> threading.Event:
    """Returns an event that SIGTERM or SIGINT sets. A second signal of the same kind has its default effect."""
    event = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # In a thread, because the interrupted main thread may hold the event's lock.
        threading.Thread(target=event.set, name="stop").start()
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return event


def run_service(main: Callable[[], None]) -> NoReturn:
    """Runs the main function of a process and ends it with exit code 0, 2 (UserError) or 1 (another TandemError).

    Any other exception is a bug: its traceback goes to the log, and the supervisor restarts the service.
    """
    try:
        with missing_extra_named():
            main()
    except UserError as error:
        print(f"tandem: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    except TandemError as error:
        print(f"tandem: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    sys.exit(0)
