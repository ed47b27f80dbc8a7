"""Calls a blocking function in a process of its own, which is forked for the call and killed after it.

So the function may hang, block, use up its memory or crash: only its call fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from tandem.protos.contracts import JsonObject
from tandem.rollout.environments.loading import described

_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1
_MAX_LINE_BYTES = 16 << 20


class CrashError(Exception):
    """The process of a call ended without a result."""


class RaisedError(Exception):
    """The function raised an exception; the message describes it."""


async def call_in_fork(function: Callable[[], JsonObject], seconds: float) -> JsonObject:
    """What the function returns, which must be JSON.

    The child has the memory of this process as it is now; what the function changes there is lost. What it started ends
    with it, unless that left its process group. Raises RaisedError, CrashError, or TimeoutError after `seconds`.
    """
    try:
        reading, writing = os.pipe()
    except OSError as error:
        raise CrashError(f"its process could not be started ({error.strerror})") from None
    try:
        child = fork_watched(lambda: _write_result(function, writing))
    except CrashError:
        os.close(reading)
        raise
    finally:
        os.close(writing)  # before the next fork, which would inherit it
    try:
        line = await _read_line(reading, seconds)
    finally:
        kill_fork(child)
    if not line.endswith(b"\n"):
        raise CrashError("its process ended without a result")
    answer: JsonObject = json.loads(line)
    if "raised" in answer:
        raise RaisedError(answer["raised"])
    return answer


def fork_watched(call: Callable[[], None]) -> int:
    """Forks a process that makes the call and ends. Returns the id for `kill_fork`.

    It ends with this process, as does what it has started. Raises CrashError if it cannot be started.
    """
    parent = os.getpid()
    sys.stdout.flush()  # else the child would print it again
    sys.stderr.flush()
    try:
        child = os.fork()
    except OSError as error:
        raise CrashError(f"its process could not be started ({error.strerror})") from None
    if child == 0:
        _watch(call, parent)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.setpgid(child, child)  # the child does it, too; whichever comes first
    return child


def kill_fork(child: int) -> None:
    """Kills a process of `fork_watched` and what it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


async def _read_line(reading: int, seconds: float) -> bytes:
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    pipe = os.fdopen(reading, "rb")
    loop = asyncio.get_running_loop()
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    try:
        async with asyncio.timeout(seconds):
            return await reader.readline()
    finally:
        transport.close()


def _watch(call: Callable[[], None], parent: int) -> NoReturn:
    """The child. Its own child makes the call; it waits, to kill both and what they started if the parent dies."""
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() == parent:  # else it died before the signal was set
            watching = os.getpid()
            if (caller := os.fork()) == 0:
                _call(call, watching)
            os.waitpid(caller, 0)
    finally:
        os._exit(0)


def _call(call: Callable[[], None], parent: int) -> None:
    """Makes the call, and ends without the exit handlers of the process from which it was forked."""
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == parent:
            call()
            sys.stdout.flush()
            sys.stderr.flush()
    finally:
        os._exit(0)


def _write_result(function: Callable[[], JsonObject], writing: int) -> None:
    """Writes one line."""
    try:
        line = json.dumps(function(), allow_nan=False)
    except Exception as error:  # user code
        line = json.dumps({"raised": described(error)})
    with os.fdopen(writing, "w") as answer:
        answer.write(line + "\n")
