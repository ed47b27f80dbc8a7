"""Time slices of the Python interpreter, by priority, for scorers that run in their callers' threads.

Python runs one thread at a time (the GIL). Without a scheduler the ring's thread would get an equal share beside those
of a job and of sixty calls. So one thread scores at a time, for some milliseconds, then the next by priority.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tandem.reward.scheduling.priority_queue import Priority, PriorityQueue

SLICE_SECONDS = 0.01
"""Length of a time slice. The item under way at its end is finished."""
MAX_WAIT_SECONDS = 1.0
"""A thread that has waited this long runs beside the one whose turn it is: an answer may have megabytes."""

Given = TypeVar("Given")
Made = TypeVar("Made")


class InterpreterScheduler:
    """Lets one thread run at a time, the next by priority. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: PriorityQueue[threading.Event] = PriorityQueue()
        self._busy = False

    def run_each(self, priority: Priority, work: Callable[[Given], Made], given: Sequence[Given]) -> list[Made]:
        """Applies `work` to each, in order. Blocks while other threads have their turns."""
        made: list[Made] = []
        scheduled = self._wait_for_turn(priority)
        try:
            slice_end = time.monotonic() + SLICE_SECONDS
            for one in given:
                if made and time.monotonic() >= slice_end:
                    scheduled = self._wait_for_turn(priority, scheduled)
                    slice_end = time.monotonic() + SLICE_SECONDS
                made.append(work(one))
        finally:
            if scheduled:
                with self._lock:
                    self._start_next()
        return made

    def _wait_for_turn(self, priority: Priority, has_turn: bool = False) -> bool:
        """Ends the turn that the thread has, and waits for another behind the others of its priority. False if none
        came in time: the thread then runs beside the others.
        """
        with self._lock:
            if not self._queue and (has_turn or not self._busy):
                self._busy = True
                return True
            turn = threading.Event()
            self._queue.add(priority, turn)
            if has_turn:
                self._start_next()
        if turn.wait(MAX_WAIT_SECONDS):
            return True
        with self._lock:
            return not self._queue.remove(priority, turn)  # not in the queue: the turn came just now

    def _start_next(self) -> None:
        found = self._queue.pop()
        self._busy = found is not None
        if found is not None:
            found[1].set()
