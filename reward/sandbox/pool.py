"""A pool of sandboxes that are started before they are needed."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from tandem.reward.sandbox.launcher import Launcher
from tandem.reward.sandbox.sandbox import Sandbox, SandboxError

START_SECONDS = 30.0
SPARE = 2
"""One for the answer, one for a test that calls it."""


class SandboxPool:
    """Keeps `SPARE` sandboxes started. Each serves one answer and is discarded; taking one starts another. Thread-safe.

    Args:
        launcher: starts the sandboxes.
        launch: creates another launcher if the launcher has ended.
        seccomp: whether programs run behind the filter of system calls.
    """

    def __init__(self, launcher: Launcher, launch: Callable[[], Launcher], *, seccomp: bool) -> None:
        self.seccomp = seccomp
        self._launcher = launcher
        self._launch = launch
        self._spare: deque[Sandbox] = deque()
        self._lock = threading.Lock()
        self._closed = False

    @property
    def isolation(self) -> str:
        return self._launcher.name

    def take(self) -> Sandbox:
        """Returns an unused sandbox, which the caller closes.

        Raises:
            SandboxError: no sandbox starts, not even with a new launcher.
        """
        try:
            return self._ready()
        except SandboxError:
            with self._lock:
                self._renew()
            return self._ready()

    def close(self) -> None:
        """Ends the spare sandboxes and the launcher; may be called again."""
        with self._lock:
            self._closed = True
            self._end_all()

    def _ready(self) -> Sandbox:
        with self._lock:
            if self._closed:
                raise SandboxError("the sandboxes were closed")
            while len(self._spare) <= SPARE:
                self._spare.append(self._launcher.open(seccomp=self.seccomp))
            sandbox = self._spare.popleft()
        try:
            sandbox.await_ready(START_SECONDS)
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def _renew(self) -> None:
        if not self._closed:
            self._end_all()
            self._launcher = self._launch()

    def _end_all(self) -> None:
        while self._spare:
            self._spare.popleft().close()
        self._launcher.close()
