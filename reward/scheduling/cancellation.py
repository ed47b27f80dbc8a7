"""Cancellation token of one scoring call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar

from tandem.protos.contracts import Unscored

CANCELLED = Unscored("timeout", "it had no score shortly before the call's deadline")
"""Of an item that had no score when its call was cancelled. Compared by identity: it is no judge's verdict."""
CLOSING = Unscored("infrastructure", "the scorer is closing")
"""Of an item that was ended by `close`, or in an endpoint or reward model by the cancellation of its call."""


class CancellationToken:
    """Can be cancelled once. Thread-safe."""

    def __init__(self) -> None:
        self.cancelled = False
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], object]] = []

    def cancel(self) -> None:
        """Stops the work of the call as soon as possible. May be called again."""
        with self._lock:
            self.cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    @contextmanager
    def on_cancel(self, callback: Callable[[], object]) -> Iterator[None]:
        """Calls `callback` in the cancelling thread, or at once if already cancelled. It must not block."""
        with self._lock:
            cancelled = self.cancelled
            if not cancelled:
                self._callbacks.append(callback)
        if cancelled:
            callback()
        try:
            yield
        finally:
            with self._lock, suppress(ValueError):  # `cancel` has taken it
                self._callbacks.remove(callback)

    @contextmanager
    def as_current(self) -> Iterator[None]:
        """Makes this the thread's `current_token`, where judges find it: their protocol has no parameter for it."""
        previous = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(previous)


_CURRENT: ContextVar[CancellationToken] = ContextVar("cancellation")


def current_token() -> CancellationToken:
    """The token of the call that this thread works for; one that is never cancelled if there is none."""
    return _CURRENT.get(None) or CancellationToken()
