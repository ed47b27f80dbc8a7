"""An event loop on a thread of its own: the coroutines of a scorer that waits for many answers at once, for callers
that block.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, suppress
from typing import Any, Generic, TypeVar

from tandem.protos.contracts import Unscored
from tandem.reward.scheduling.cancellation import current_token

T = TypeVar("T")
Shared = TypeVar("Shared")

CLOSING = Unscored("infrastructure", "the scorer is closing")
"""For items whose work `close`, or the end of their call, ended."""

_LOOK_SECONDS = 5.0  # how often a caller makes sure that the thread still lives
_OPEN_SECONDS = 60.0
_END_SECONDS = 10.0


class ClosedError(Exception):
    """The loop was closed before the work was done, or its caller's patience was at an end."""


class LoopThread(Generic[Shared]):
    """Runs coroutines for the threads that call `run`. Starts with the first call; `shared` is opened on the loop, and
    closed there.
    """

    def __init__(self, name: str, shared: Callable[[], AbstractAsyncContextManager[Shared]]) -> None:
        self._name = name
        self._open = shared
        self._lock = threading.Lock()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._ready: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, Shared]] = Future()

    def run(self, work: Callable[[Shared], Coroutine[Any, Any, T]]) -> T:
        """Runs the coroutine to its end and returns its result; blocks the caller. The coroutine bounds its own waits.

        If the caller's cancellation token is cancelled first, so is the coroutine.

        Raises:
            ClosedError: that, or `close` was called before, or meanwhile.
        """
        with self._lock:  # a submission is queued before the stop that `close` queues, or not at all
            if self._closed:
                raise ClosedError
            if self._thread is None:
                self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name=self._name, daemon=True)
                self._thread.start()
            loop, _, shared = self._ready.result(_OPEN_SECONDS)
            future = asyncio.run_coroutine_threadsafe(work(shared), loop)
        with current_token().on_cancel(future.cancel):
            return self._result_of(future)

    def _result_of(self, future: Future[T]) -> T:
        assert self._thread is not None, "it was started for this"
        while True:
            try:
                return future.result(timeout=_LOOK_SECONDS)
            except CancelledError:
                raise ClosedError from None
            except TimeoutError:
                if future.done():
                    return future.result()  # what it raised, if that was a TimeoutError of its own
                if not self._thread.is_alive():
                    raise ClosedError from None

    @property
    def shared(self) -> Shared | None:
        """What the coroutines share, None before the first call. It belongs to the loop: others may look at plain
        numbers in it.
        """
        started = self._ready.done() and self._ready.exception() is None
        return self._ready.result()[2] if started else None

    def close(self) -> None:
        """Cancels what runs and ends the thread; may be called again."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is None:
            return
        if self._ready.exception(_OPEN_SECONDS) is None:
            loop, stop, _ = self._ready.result()
            with suppress(RuntimeError):  # the loop is closed already: another thread was faster
                loop.call_soon_threadsafe(stop.set)
        thread.join(_END_SECONDS)

    async def _serve(self) -> None:
        stop = asyncio.Event()
        try:
            async with self._open() as shared:
                self._ready.set_result((asyncio.get_running_loop(), stop, shared))
                await stop.wait()
                running = asyncio.all_tasks() - {asyncio.current_task()}
                for task in running:
                    task.cancel()
                await asyncio.gather(*running, return_exceptions=True)
        except BaseException as error:
            if self._ready.done():
                raise
            self._ready.set_exception(error)  # for the caller that wanted it
