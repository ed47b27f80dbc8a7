"""Who is served next: three lanes with weights, and turns within a lane."""

from __future__ import annotations

from collections import deque
from typing import Generic, Literal, TypeVar

Lane = Literal["ring", "calls", "jobs"]
LANES: tuple[Lane, ...] = ("ring", "calls", "jobs")
"""In the order of their priority: groups that training waits for, calls that somebody waits for, jobs that run for hours."""

SHARE = 4
"""Of so many turns taken while a lower lane waits, one is the lower lanes'."""

T = TypeVar("T")


class Lanes(Generic[T]):
    """Queues by lane. The higher lane goes first, but not always, so that none starves. Not thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[Lane, deque[T]] = {lane: deque() for lane in LANES}
        self._turns = dict.fromkeys(LANES, 0)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def waiting(self, lane: Lane) -> int:
        """How many wait in a lane."""
        return len(self._waiting[lane])

    def add(self, lane: Lane, one: T) -> None:
        """To the lane's end: those in a lane take turns."""
        self._waiting[lane].append(one)

    def put_back(self, lane: Lane, one: T) -> None:
        """To the lane's head."""
        self._waiting[lane].appendleft(one)

    def remove(self, lane: Lane, one: T) -> bool:
        """Takes it out of its lane; False if it is not there."""
        try:
            self._waiting[lane].remove(one)
        except ValueError:
            return False
        return True

    def next(self) -> tuple[Lane, T] | None:
        """Takes out who is next; None if nobody waits."""
        busy = [lane for lane in LANES if self._waiting[lane]]
        while len(busy) > 1:
            self._turns[busy[0]] += 1
            if self._turns[busy[0]] < SHARE:
                break
            self._turns[busy[0]] = 0
            busy = busy[1:]
        return (busy[0], self._waiting[busy[0]].popleft()) if busy else None

    def clear(self) -> list[T]:
        """Empties every lane."""
        everything = [one for lane in LANES for one in self._waiting[lane]]
        for queue in self._waiting.values():
            queue.clear()
        return everything
