"""Turns at the interpreter, by lane, for scorers that run in the threads of their callers.

Python runs one thread at a time. Scorers of this process cannot hang, but a job's threads and those of sixty calls, all
of them scoring, would leave the ring's one a share of as many parts. So one scores at a time, for some milliseconds,
and then who is next (`tandem.reward.scheduling.priority_queue`). It costs nothing that scoring at the same time could
have given.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from tandem.reward.scheduling.priority_queue import Priority, PriorityQueue

TURN_SECONDS = 0.01
"""Of one turn, the item that it ends with aside."""
PATIENCE_SECONDS = 1.0
"""Whoever has waited so long (an answer may have megabytes) goes on beside the one whose turn it is."""

Given = TypeVar("Given")
Made = TypeVar("Made")


class InterpreterScheduler:
    """One thread at a time, the next by lane. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._line: PriorityQueue[threading.Event] = PriorityQueue()
        self._taken = False

    def waiting(self, lane: Priority) -> int:
        """How many threads wait for their turn, in a lane."""
        return self._line.waiting(lane)

    def each(self, lane: Priority, work: Callable[[Given], Made], given: Sequence[Given]) -> list[Made]:
        """What `work` makes of each, in order. Blocks while it is the turn of others."""
        made: list[Made] = []
        mine = self._begin(lane)
        try:
            until = time.monotonic() + TURN_SECONDS
            for one in given:
                if made and time.monotonic() >= until:
                    mine = self._again(lane, mine)
                    until = time.monotonic() + TURN_SECONDS
                made.append(work(one))
        finally:
            if mine:
                self._pass_on()
        return made

    def _begin(self, lane: Priority) -> bool:
        """Waits for a turn. Whether it is one: False, if patience was at an end."""
        with self._lock:
            if not self._taken:
                self._taken = True
                return True
            turn = threading.Event()
            self._line.add(lane, turn)
        return self._wait(lane, turn)

    def _again(self, lane: Priority, mine: bool) -> bool:
        """The next turn of one who has more to do: behind the others of its lane."""
        if not mine:
            return self._begin(lane)
        with self._lock:
            if not self._line:
                return True
            turn = threading.Event()
            self._line.add(lane, turn)
            self._hand_over()
        return self._wait(lane, turn)

    def _wait(self, lane: Priority, turn: threading.Event) -> bool:
        if turn.wait(PATIENCE_SECONDS):
            return True
        with self._lock:
            return not self._line.remove(lane, turn)  # it may have come just now

    def _pass_on(self) -> None:
        with self._lock:
            self._hand_over()

    def _hand_over(self) -> None:
        found = self._line.next()
        self._taken = found is not None
        if found is not None:
            found[1].set()
