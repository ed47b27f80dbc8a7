"""What is scarce on an event loop, handed out by lane: places, rates, money."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority, PriorityQueue


@dataclass(slots=True, eq=False)
class _Waiter:
    take: Callable[[], float]
    passed: asyncio.Future[None]
    again: bool


class AdmissionQueue:
    """A line of coroutines by lane: whoever is next takes what it needs as soon as that is there, and the others wait
    behind it.

    Who is next is found whenever there may be room, and not before: one of a higher lane passes those who came earlier,
    up to the share that lower lanes have (`tandem.reward.scheduling.priority_queue`). One that is next is not passed by
    one that needs less, or those that need much would never come. Used by the coroutines of one event loop.
    """

    def __init__(self) -> None:
        self._line: PriorityQueue[_Waiter] = PriorityQueue()
        self._num_again = dict.fromkeys(PRIORITIES, 0)  # the first of each lane
        self._timer: asyncio.TimerHandle | None = None

    def waiting(self, lane: Priority) -> int:
        """How many wait in a lane."""
        return self._line.waiting(lane)

    async def enter(
        self, lane: Priority, take: Callable[[], float], give_back: Callable[[], None], *, again: bool = False
    ) -> None:
        """Waits for its turn until `take` has taken. The caller's time-out bounds the wait.

        Args:
            take: takes what is needed and returns 0; or takes nothing and returns the seconds after which it is worth
                another try,
                infinite if only a `look` can tell. It raises nothing.
            give_back: undoes it, for one that is cancelled just as it was let through.
            again: it was let through before for the same thing: it goes before those of its lane that were not.
        """
        waiter = _Waiter(take, asyncio.get_running_loop().create_future(), again)
        if again:
            self._line.put_back(lane, waiter, self._num_again[lane])
            self._num_again[lane] += 1
        else:
            self._line.add(lane, waiter)
        self.look()
        try:
            await waiter.passed
        except asyncio.CancelledError:
            if self._line.remove(lane, waiter):
                self._num_again[lane] -= again
            else:
                give_back()
            self.look()  # it may have been next
            raise

    def look(self) -> None:
        """Lets through whom there is room for. For those who make room."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (found := self._line.peek()) is not None:
            lane, waiter = found
            delay = waiter.take()
            if delay > 0.0:
                if delay < math.inf:
                    self._timer = asyncio.get_running_loop().call_later(delay, self.look)
                return
            self._line.next()
            self._num_again[lane] -= waiter.again
            if not waiter.passed.done():  # else it is being cancelled, and gives back
                waiter.passed.set_result(None)


class PrioritySemaphore:
    """So many may be at it at once, by lane. Used by the coroutines of one event loop."""

    def __init__(self, number: int) -> None:
        self._free = number
        self._gate = AdmissionQueue()

    def waiting(self, lane: Priority) -> int:
        """How many wait for a place, in a lane."""
        return self._gate.waiting(lane)

    async def enter(self, lane: Priority) -> None:
        """Waits for a place, and takes it until `leave`. The caller's time-out bounds the wait."""
        await self._gate.enter(lane, self._take, self._put)

    def leave(self) -> None:
        """Gives the place to who is next."""
        self._put()
        self._gate.look()

    def _take(self) -> float:
        if not self._free:
            return math.inf
        self._free -= 1
        return 0.0

    def _put(self) -> None:
        self._free += 1
