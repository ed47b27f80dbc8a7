"""Until when somebody wants scores: whoever asked ends it, and what works for him stops."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from tandem.protos.contracts import Unscored

CUT_OFF = Unscored("timeout", "it had no score shortly before the call's deadline")
"""For items without a score when a cutoff ends. Known by its identity: no judge has spoken, so no rubric may go on
without it.
"""


class CancellationToken:
    """Ends once. Thread-safe."""

    def __init__(self) -> None:
        self.ended = False
        self._lock = threading.Lock()
        self._hooks: list[Callable[[], object]] = []

    def end(self) -> None:
        """From now on nobody wants what is not done. May be called again."""
        with self._lock:
            self.ended = True
            hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook()

    @contextmanager
    def hooked(self, hook: Callable[[], object]) -> Iterator[None]:
        """Calls `hook` if it ends within the block, in the thread that ends it; at once if it has ended. The hook must
        not wait.
        """
        with self._lock:
            ended = self.ended
            if not ended:
                self._hooks.append(hook)
        if ended:
            hook()
        try:
            yield
        finally:
            with self._lock:
                if hook in self._hooks:
                    self._hooks.remove(hook)

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Within the block, in this thread, `current` is this one: for judges, whose protocol is the user's too and
        knows no cutoff.
        """
        token = _CURRENT.set(self)
        try:
            yield
        finally:
            _CURRENT.reset(token)


_CURRENT: ContextVar[CancellationToken] = ContextVar("cutoff")


def current() -> CancellationToken:
    """The cutoff of the call that this thread judges for; one that never ends for whoever has none."""
    return _CURRENT.get(None) or CancellationToken()
