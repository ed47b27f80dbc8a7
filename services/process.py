"""What every process of a run has in common: it ends with its parent, stops on a signal, and dies with one
clear line.
"""

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
from tandem.services.extras import missing_extra_named

_PR_SET_PDEATHSIG = 1


def die_with_parent(expected_parent: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent thread ends, even by -9 (Linux prctl).

    `expected_parent` closes the race of a parent that died before this call: the process then ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if expected_parent is not None and os.getppid() != expected_parent:
        os._exit(1)


@contextmanager
def starting() -> Iterator[None]:
    """Collects no garbage inside. Imports make a million objects that stay: looking through them time and again is a
    fifth of a start, and after it they are never looked through again.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def stop_event() -> threading.Event:
    """An event that SIGTERM or SIGINT sets; a second signal of the kind ends the process the default way."""
    event = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # From a thread: the main thread may be interrupted while it holds the event's own lock.
        threading.Thread(target=event.set, name="stop").start()
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return event


def run_service(main: Callable[[], None]) -> NoReturn:
    """Runs a process's main function and ends the process: 0 finished, 2 a user's error, 1 any other error of ours.

    A bug (an exception outside the tree) keeps its traceback: the log must show it, and the supervisor restarts the
    service.
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
