"""Waiting for what another thread or process does; and a service's loop in such a thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


def eventually(condition: Callable[[], Any], seconds: float = 20.0) -> None:
    """Looks again and again until it is true; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


@contextmanager
def looping(run: Callable[[threading.Event], object]) -> Iterator[None]:
    """Runs it in a thread while this is open, then sets the event it was given; what it raised is raised at the end."""
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
