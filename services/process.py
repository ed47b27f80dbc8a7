"""Shared by all processes of a run: they end with their parent, stop on a signal, lock files, and start threads."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import ctypes
import faulthandler
import fcntl
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from types import FrameType
from typing import IO, Self, TypeVar

from tandem.protos.garbage_collection import collect_less_often

log = logging.getLogger(__name__)

PARENT_VARIABLE = "TANDEM_PARENT_PID"
"""Pid of the supervisor; `tandem serve` exits when the supervisor does (`die_with_parent`)."""

PROCESS_MARK_VARIABLE = "TANDEM_PROCESS_MARK"
"""`<run token>:<child>` of a supervisor's child, inherited by everything it starts, in any session, and killed with it.
"""

_SLOW_STOP_SECONDS = 5.0  # a supervisor kills its services after 6 s

_PR_SET_PDEATHSIG = 1
_EXECUTE = f"""
import ctypes, os, sys
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, {int(signal.SIGKILL)})
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""
_LOCK_POLL_SECONDS = 0.02
_LOW_PRIORITY = 5  # a niceness
_JOIN_SECONDS = 2.0

Returned = TypeVar("Returned")


def die_with_parent(expected_parent: int | None = None) -> None:
    """Asks the kernel to kill this process when its parent thread ends, even by kill -9 (Linux prctl).

    If `expected_parent` died before this call, the process ends at once.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if expected_parent is not None and os.getppid() != expected_parent:
        os._exit(1)


def dying_with_parent(command: Sequence[str]) -> list[str]:
    """The command of a process that the kernel kills when the thread that starts it ends.

    In place of `preexec_fn`, with which Python forks: beside gRPC's threads one in 40 such children was killed by
    SIGABRT before it began, and calls of the parent failed.
    """
    return [sys.executable, "-I", "-S", "-c", _EXECUTE, str(os.getpid()), *command]


def yield_to_others() -> None:
    """Gives this process, which leads a session, a third of the processor time of any other that wants it."""
    os.nice(_LOW_PRIORITY)
    # Linux's autogroups share processors between sessions, and niceness counts within one. Not every kernel has them.
    with suppress(OSError):
        Path("/proc/self/autogroup").write_text(str(_LOW_PRIORITY))


@contextmanager
def starting() -> Iterator[None]:
    """Turns garbage collection off inside, and excludes the objects made there from later collections: imports create a
    million of them, and collection among them takes a fifth of the start (benchmarks/startup.py). Collections are less
    frequent afterwards.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        collect_less_often()


def stop_event() -> threading.Event:
    """An event that SIGTERM or SIGINT sets. A second signal of the same kind has its default effect.

    If a supervisor runs the process, the log says where its threads are if they do not end in time.
    """
    event = threading.Event()

    def on_signal(number: int, _frame: FrameType | None) -> None:
        # In a thread, because the interrupted main thread may hold the event's lock. It may also hold one that a
        # `threading.Thread` needs to start.
        _thread.start_new_thread(event.set, ())
        if PROCESS_MARK_VARIABLE in os.environ:
            faulthandler.dump_traceback_later(_SLOW_STOP_SECONDS)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    return event


def lock_file(file: IO[str], seconds: float = 0.0, *, shared: bool = False) -> bool:
    """Waits at most this long for a lock on an open file, and returns whether it is held. Closing the file ends it."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(_LOCK_POLL_SECONDS)


def in_thread(name: str, call: Callable[..., Returned], *arguments: object) -> Future[Returned]:
    """Runs the call in a daemon thread: one that hangs keeps no process from ending. Cancelling does not end it."""
    future, run = _settling(call, arguments)
    threading.Thread(target=run, name=name, daemon=True).start()
    return future


class SerialExecutor:
    """Runs calls one after the other in a daemon thread. The caller goes on at once, while that of `in_thread` waits
    until the new thread runs.
    """

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[..., Returned], *arguments: object) -> Future[Returned]:
        """Queues the call. Cancelling its future does not end it."""
        future, run = _settling(call, arguments)
        self._calls.put(run)
        return future

    def close(self) -> None:
        """Lets the thread end after the calls that were submitted."""
        self._calls.put(None)

    def _run(self) -> None:
        while (run := self._calls.get()) is not None:
            run()
            del run  # the call's arguments


def _settling(
    call: Callable[..., Returned], arguments: Sequence[object]
) -> tuple[Future[Returned], Callable[[], None]]:
    """A future, and a function that makes the call and settles the future."""
    future: Future[Returned] = Future()
    future.set_running_or_notify_cancel()  # from here on it cannot be cancelled

    def run() -> None:
        try:
            future.set_result(call(*arguments))
        except BaseException as error:
            future.set_exception(error)

    return future, run


async def run_in_thread(call: Callable[..., Returned], *arguments: object) -> Returned:
    """As `in_thread`, in the context of the caller."""
    return await asyncio.wrap_future(in_thread("lease-work", contextvars.copy_context().run, call, *arguments))


class Repeated:
    """Context manager: a daemon thread makes the call every `seconds` until the block is left.

    A call that raises is a bug: it ends the process as Ctrl-C does, and leaving the block raises its error. An error
    that leaves the block already is kept, because it decides the exit code; then the call's error is only logged.
    """

    _interrupted = threading.Lock()
    """Held from the first failure of a call on, whichever: a second SIGINT would kill the process as it stops."""

    def __init__(self, name: str, seconds: float, call: Callable[[], None]) -> None:
        self._seconds = seconds
        self._call = call
        self._ended = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, _kind: object, leaving: object, _traceback: object) -> None:
        """Waits for a call under way, but not long: it may hang in Redis. Raises the error of a call."""
        self._ended.set()
        self._thread.join(timeout=self._seconds + _JOIN_SECONDS)
        if self._error is None:
            return
        if not isinstance(leaving, Exception):  # KeyboardInterrupt may be of the SIGINT that the call's error has sent
            raise self._error
        log.error("the thread %s failed, too", self._thread.name, exc_info=self._error)

    def _run(self) -> None:
        try:
            while not self._ended.wait(self._seconds):
                self._call()
        except BaseException as error:
            self._error = error
            if not self._ended.is_set():
                log.error("the thread %s ended with %r; this process stops", self._thread.name, error)
                if self._interrupted.acquire(blocking=False):
                    main = threading.main_thread().ident
                    assert main is not None, "the main thread has started"
                    signal.pthread_kill(main, signal.SIGINT)  # wakes it from a wait
