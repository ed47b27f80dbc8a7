"""Waits for other threads and processes, and runs a service's loop in a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def eventually(condition: Callable[[], Any], seconds: float = 30.0) -> None:
    """Polls the condition until it is true; fails after the given seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


class CountingLock:
    """A lock that counts who asked for it."""

    def __init__(self) -> None:
        self.num_asked = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self.num_asked += 1
        self._lock.acquire()

    def __exit__(self, *_exception: object) -> None:
        self._lock.release()


@contextmanager
def looping(run: Callable[[threading.Event], object]) -> Iterator[None]:
    """Runs the function in a thread inside the `with` block; then sets its stop event and raises its error, if any."""
    stop = threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            run(stop)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=20.0)
        assert not thread.is_alive()
    if failures:
        raise failures[0]
