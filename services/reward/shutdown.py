"""Waits of the reward service's calls. They end at the call's deadline, and when the service stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from tandem.protos.errors import DeadlineError, UnavailableError

LONGEST_CALL_SECONDS = 3600.0
"""Deadline of calls that have a later one or none."""
IDLE_SECONDS = 600.0
"""A stream ends after this time without a request that is new or being scored."""
SHUTTING_DOWN = "the service is shutting down; try again, here or at another replica"
_GRACE_SECONDS = 0.5  # for calls in threads when the service stops

Result = TypeVar("Result")


class Shutdown:
    """Ends the waits of calls on one event loop when the service stops."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()

    def check(self) -> None:
        """Raises UnavailableError once the service stops."""
        if self.closing.is_set():
            raise UnavailableError(SHUTTING_DOWN)

    async def sleep(self, seconds: float, ends_at: float) -> None:
        """Raises DeadlineError past `ends_at` (of time.monotonic) and UnavailableError once the service stops."""
        _check_time(ends_at)
        try:
            await asyncio.wait_for(self.closing.wait(), seconds)
        except TimeoutError:
            return
        self.check()

    async def run_in(
        self, threads: ThreadPoolExecutor, call: Callable[..., Result], *arguments: Any, seconds: float | None = None
    ) -> Result:
        """Runs a call in a thread and returns its result. Raises DeadlineError if it takes longer than `seconds`
        (default: LONGEST_CALL_SECONDS), and UnavailableError if the service stops and the call does not end soon.
        """
        self.check()
        seconds = LONGEST_CALL_SECONDS if seconds is None else seconds
        future = asyncio.get_running_loop().run_in_executor(threads, call, *arguments)
        closing: asyncio.Future[bool] = asyncio.ensure_future(self.closing.wait())
        either: set[asyncio.Future[Any]] = {future, closing}
        try:
            await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            if closing.done():
                await asyncio.wait({future}, timeout=_GRACE_SECONDS)
            if future.done():
                return future.result()
        finally:
            closing.cancel()
            future.cancel()
        self.check()
        raise DeadlineError(f"not done within {seconds:.0f} s")

    async def requests(self, stream: AsyncIterator[Result], ends_at: float) -> AsyncGenerator[Result]:
        """The requests of a stream. Raises UnavailableError when the service stops, and DeadlineError when the call's
        time is over or no request came for IDLE_SECONDS.
        """
        closing = asyncio.ensure_future(self.closing.wait())
        try:
            while True:
                reading = asyncio.ensure_future(anext(stream, None))
                timeout = min(IDLE_SECONDS, max(0.0, ends_at - time.monotonic()))
                either = {closing, reading}
                try:
                    done, _ = await asyncio.wait(either, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
                    self.check()
                    _check_time(ends_at)
                    if not done:
                        raise DeadlineError(f"nothing came for {IDLE_SECONDS:.0f} s; send the header again to go on")
                    request = reading.result()
                finally:
                    reading.cancel()
                if request is None:
                    return
                yield request
        finally:
            closing.cancel()


def seconds_left(context: grpc.aio.ServicerContext) -> float:
    """The time until the caller's deadline, or LONGEST_CALL_SECONDS if that is less."""
    left = context.time_remaining()
    return LONGEST_CALL_SECONDS if left is None else min(left, LONGEST_CALL_SECONDS)


def _check_time(ends_at: float) -> None:
    if time.monotonic() > ends_at:
        raise DeadlineError("the call has reached its deadline; the same call again continues where this one ends")
