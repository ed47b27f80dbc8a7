"""Time slices of the Python interpreter, by priority, for scorers that run in their callers' threads.

Python runs one thread at a time (the GIL). Scorers of this process cannot hang, but without a scheduler the ring's
thread would get an equal share beside a job's threads and those of sixty calls. So one thread scores at a time, for
some milliseconds, and then the next by `tandem.reward.scheduling.priority_queue`. Nothing is lost by this: the threads
could not have scored in parallel.
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

    def waiting(self, priority: Priority) -> int:
        """Number of threads that wait at this priority."""
        return self._queue.waiting(priority)

    def run_each(self, priority: Priority, work: Callable[[Given], Made], given: Sequence[Given]) -> list[Made]:
        """Applies `work` to each, in order. Blocks while other threads have their turns."""
        made: list[Made] = []
        scheduled = self._begin(priority)
        try:
            slice_end = time.monotonic() + SLICE_SECONDS
            for one in given:
                if made and time.monotonic() >= slice_end:
                    scheduled = self._requeue(priority, scheduled)
                    slice_end = time.monotonic() + SLICE_SECONDS
                made.append(work(one))
        finally:
            if scheduled:
                with self._lock:
                    self._start_next()
        return made

    def _begin(self, priority: Priority) -> bool:
        """Waits for a turn. False if none came in time and the thread runs beside the others."""
        with self._lock:
            if not self._busy:
                self._busy = True
                return True
            turn = threading.Event()
            self._queue.add(priority, turn)
        return self._wait(priority, turn)

    def _requeue(self, priority: Priority, scheduled: bool) -> bool:
        """Waits for a further turn, behind the others of the same priority."""
        if not scheduled:
            return self._begin(priority)
        with self._lock:
            if not self._queue:
                return True
            turn = threading.Event()
            self._queue.add(priority, turn)
            self._start_next()
        return self._wait(priority, turn)

    def _wait(self, priority: Priority, turn: threading.Event) -> bool:
        if turn.wait(MAX_WAIT_SECONDS):
            return True
        with self._lock:
            return not self._queue.remove(priority, turn)  # not in the queue: the turn came just now

    def _start_next(self) -> None:
        found = self._queue.pop()
        self._busy = found is not None
        if found is not None:
            found[1].set()
