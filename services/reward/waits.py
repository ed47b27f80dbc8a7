"""How long the calls of a service may wait: as long as they have, and not past the service's own end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc

from tandem.protos.errors import DeadlineError, UnavailableError

LONGEST_CALL_SECONDS = 3600.0
"""For a caller without a deadline, or with a later one."""
IDLE_SECONDS = 600.0
"""A stream on which nothing comes and nothing is under way ends after that."""
SHUTTING_DOWN = "the service is shutting down; another one, or this one once it is back, goes on"
_GRACE_SECONDS = 0.5  # for what is under way when the service stops

Result = TypeVar("Result")


class Waits:
    """Ends every wait once the service does. Made anywhere, used on one event loop."""

    def __init__(self) -> None:
        self.closing = asyncio.Event()

    def check_open(self) -> None:
        """Raises UnavailableError once the service ends."""
        if self.closing.is_set():
            raise UnavailableError(SHUTTING_DOWN)

    async def sleep(self, seconds: float, ends_at: float) -> None:
        """Raises DeadlineError past `ends_at`, of time.monotonic, and UnavailableError as soon as the service ends."""
        _check_time(ends_at)
        try:
            await asyncio.wait_for(self.closing.wait(), seconds)
        except TimeoutError:
            return
        self.check_open()

    async def in_thread(
        self, threads: ThreadPoolExecutor, call: Callable[..., Result], *arguments: Any, seconds: float | None = None
    ) -> Result:
        """The call's result. A service that stops waits for it a little longer.

        Raises:
            DeadlineError: it takes more than `seconds`; none given: LONGEST_CALL_SECONDS.
            UnavailableError: the service ends.
        """
        self.check_open()
        seconds = LONGEST_CALL_SECONDS if seconds is None else seconds
        future = asyncio.get_running_loop().run_in_executor(threads, call, *arguments)
        closing: asyncio.Future[Any] = asyncio.ensure_future(self.closing.wait())
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
        self.check_open()
        raise DeadlineError(f"not done within {seconds:.0f} s")

    async def incoming(self, requests: AsyncIterator[Result], ends_at: float) -> AsyncGenerator[Result]:
        """The requests of a stream; ends the wait for one when the service stops, its time is over or nothing has come
        for long.
        """
        closing = asyncio.ensure_future(self.closing.wait())
        try:
            while True:
                reading = asyncio.ensure_future(anext(requests, None))
                try:
                    patience = min(IDLE_SECONDS, max(0.0, ends_at - time.monotonic()))
                    done, _ = await asyncio.wait(
                        {closing, reading}, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                    )
                    self.check_open()
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
    """Until the caller's deadline, or ours if that is earlier."""
    left = context.time_remaining()
    return LONGEST_CALL_SECONDS if left is None else min(left, LONGEST_CALL_SECONDS)


def _check_time(ends_at: float) -> None:
    if time.monotonic() > ends_at:
        raise DeadlineError("the call has lasted as long as one may; the same call again goes on where this one ends")
