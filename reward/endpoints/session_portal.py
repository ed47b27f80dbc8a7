"""Event loop with one session, on anyio's blocking portal, for threads that call a scorer with many requests."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any, Generic, TypeVar

from anyio.from_thread import BlockingPortal, start_blocking_portal

from tandem.reward.scheduling.cancellation import current_token

T = TypeVar("T")
Session = TypeVar("Session")


class ClosedError(Exception):
    """The portal was closed or the caller's token cancelled before the work was done."""


class SessionPortal(Generic[Session]):
    """Runs coroutines on the event loop of a thread, which the first `run` starts. Thread-safe."""

    def __init__(self, name: str, open_session: Callable[[], AbstractAsyncContextManager[Session]]) -> None:
        self._name = name
        self._open_session = open_session
        self._lock = threading.Lock()
        self._closed = False
        self._started: tuple[BlockingPortal, Session] | None = None
        self._running: set[Future[Any]] = set()
        self._finalizer: weakref.finalize[[], SessionPortal[Session]] | None = None

    def run(self, work: Callable[[Session], Coroutine[Any, Any, T]]) -> T:
        """Runs the coroutine, which bounds its own waits; blocks the caller.

        Raises ClosedError if the caller's token was cancelled, and so the coroutine, or `close` was called.
        """
        with self._lock:  # so that `close` finds every future, and no work reaches a loop that is ending
            if self._closed:
                raise ClosedError
            portal, session = self._start()
            future: Future[T] = portal.start_task_soon(work, session)
            self._running.add(future)
        try:
            with current_token().on_cancel(future.cancel):
                return future.result()
        except CancelledError:
            raise ClosedError from None
        finally:
            self._running.discard(future)

    @property
    def session(self) -> Session | None:
        """The session, None before the first call. It belongs to the loop: others may only read plain numbers in it."""
        return self._started[1] if self._started is not None else None

    def close(self) -> None:
        """Cancels running coroutines, closes the session and ends the thread. May be called again."""
        with self._lock:
            self._closed = True
            if self._finalizer is not None:
                self._finalizer()

    def _start(self) -> tuple[BlockingPortal, Session]:
        if self._started is None:
            with ExitStack() as stack:
                portal = stack.enter_context(start_blocking_portal(name=self._name))
                session = stack.enter_context(portal.wrap_async_context_manager(self._open_session()))
                stack.callback(_cancel_all, self._running)
                # Also before the interpreter exits: anyio would wait for a thread that no longer runs.
                self._finalizer = weakref.finalize(self, stack.pop_all().close)
                self._started = portal, session
        return self._started


def _cancel_all(running: set[Future[Any]]) -> None:
    for future in list(running):
        future.cancel()
