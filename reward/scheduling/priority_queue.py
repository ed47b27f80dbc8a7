"""Who is served next: three lanes with weights, and turns within a lane."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

Priority = Literal["ring", "calls", "jobs"]
PRIORITIES: tuple[Priority, ...] = ("ring", "calls", "jobs")
"""In the order of their priority: groups that training waits for, calls that somebody waits for, jobs that run for
hours.
"""

SHARE = 4
"""Of so many turns taken while a lower lane waits, one is the lower lanes'."""

T = TypeVar("T")


class PriorityQueue(Generic[T]):
    """Queues by lane. The higher lane goes first, but not always, so that none starves. Not thread-safe.

    The one rule of all that is scarce: the pool's processes, the interpreter
    (`tandem.reward.scheduling.interpreter_scheduler`), a judge's requests, rates and money
    (`tandem.reward.scheduling.admission_queue`), the batches of a reward model (`tandem.reward.workers.model_batcher`).
    """

    def __init__(self) -> None:
        self._waiting: dict[Priority, deque[T]] = {lane: deque() for lane in PRIORITIES}
        self._turns = dict.fromkeys(PRIORITIES, 0)

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def waiting(self, lane: Priority) -> int:
        """How many wait in a lane."""
        return len(self._waiting[lane])

    def add(self, lane: Priority, one: T) -> None:
        """To the lane's end: those in a lane take turns."""
        self._waiting[lane].append(one)

    def put_back(self, lane: Priority, one: T, behind: int = 0) -> None:
        """To the lane's head, or behind so many there."""
        self._waiting[lane].insert(behind, one)

    def remove(self, lane: Priority, one: T) -> bool:
        """Takes it out of its lane; False if it is not there."""
        try:
            self._waiting[lane].remove(one)
        except ValueError:
            return False
        return True

    def head(self, lane: Priority) -> T | None:
        """Who is first in a lane; None if nobody waits in it."""
        return self._waiting[lane][0] if self._waiting[lane] else None

    def peek(self) -> tuple[Priority, T] | None:
        """Who is next, and stays in its lane; None if nobody waits. If another comes in a higher lane, that one may be
        next.
        """
        busy = self._busy()
        if not busy:
            return None
        lane = busy[self._place(busy)]
        return lane, self._waiting[lane][0]

    def next(self) -> tuple[Priority, T] | None:
        """Takes out who is next; None if nobody waits."""
        busy = self._busy()
        if not busy:
            return None
        lane = self._turn(busy)
        return lane, self._waiting[lane].popleft()

    def next_of(self, lane: Priority) -> T:
        """Takes out who is first in a lane, as part of the turn that `next` gave it."""
        return self._waiting[lane].popleft()

    def goes_on(self, lane: Priority) -> bool:
        """Whether one that was taken out of this lane and has more to do has the next turn as well. If so, it
        is taken.
        """
        busy = [one for one in PRIORITIES if one == lane or self._waiting[one]]
        mine = busy[self._place(busy)] == lane
        if mine:
            self._turn(busy)
        return mine

    def clear(self) -> list[T]:
        """Empties every lane."""
        everything = [one for lane in PRIORITIES for one in self._waiting[lane]]
        for queue in self._waiting.values():
            queue.clear()
        return everything

    def _busy(self) -> list[Priority]:
        return [lane for lane in PRIORITIES if self._waiting[lane]]

    def _place(self, busy: Sequence[Priority]) -> int:
        """Which of these lanes has the next turn: one that has had all but one of SHARE leaves it to those below."""
        place = 0
        while place + 1 < len(busy) and self._turns[busy[place]] + 1 >= SHARE:
            place += 1
        return place

    def _turn(self, busy: Sequence[Priority]) -> Priority:
        """The same, and counts it."""
        place = self._place(busy)
        for passed in busy[:place]:
            self._turns[passed] = 0
        if place + 1 < len(busy):
            self._turns[busy[place]] += 1
        return busy[place]
