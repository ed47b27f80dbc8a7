"""The calls of a trainer, numbered: a Redis that has lost one of them refuses the next."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tandem.protos.errors import UnavailableError
from tandem.services.buffer.connection import Connection


class TrainerCalls:
    """Runs the verbs of one trainer process, one after the other. Thread-safe.

    Every change has the next number, and Redis keeps the number of the last one that it made. Each call also names the
    last change that Redis acknowledged to this process. A Redis whose number is lower has lost writes: it refuses the
    call (LostWritesError) until a new incarnation begins. A number for the whole ledger would not show this, for
    changes of other services could make it grow again before the trainer's next call.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()  # two calls at once would be numbered in another order than they are made
        self._last = 0
        self._acknowledged = 0
        self._gave_up_at = -math.inf
        self._fault = ""

    def change(self, verb: str, *arguments: str | int) -> Any:
        with self._one_at_a_time():
            self._last += 1
            number = self._last
            reply = self._connection.run(verb, *arguments, self._acknowledged, number)
            self._acknowledged = number
            return reply

    def check(self, verb: str, *arguments: str | int) -> None:
        """Runs a verb that changes nothing."""
        with self._one_at_a_time():
            self._connection.run(verb, *arguments, self._acknowledged, self._acknowledged)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """A call that has waited for one that gave up an outage gives up, too: all wait once for it."""
        called_at = time.monotonic()
        with self._lock:
            if self._gave_up_at > called_at:
                raise UnavailableError(self._fault)
            try:
                yield
            except UnavailableError as error:
                self._gave_up_at, self._fault = time.monotonic(), str(error)
                raise
