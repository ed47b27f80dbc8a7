"""Admission by priority to what is scarce on an event loop: concurrent requests, rates, money."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass

from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority, PriorityQueue


@dataclass(slots=True, eq=False)
class _Waiter:
    take: Callable[[], float]
    admitted: asyncio.Future[None]
    again: bool


class AdmissionQueue:
    """Coroutines wait here, ordered by priority, until there is room for them.

    The next waiter is chosen when there may be room, so a later one of a higher priority goes first. A waiter that is
    next and needs much is not passed by one that needs less; else it might never be admitted. For one event loop.
    """

    def __init__(self) -> None:
        self._queue: PriorityQueue[_Waiter] = PriorityQueue()
        self._num_again = dict.fromkeys(PRIORITIES, 0)  # they are the first of each priority
        self._timer: asyncio.TimerHandle | None = None

    def waiting(self, priority: Priority) -> int:
        return self._queue.waiting(priority)

    async def admit(
        self, priority: Priority, take: Callable[[], float], give_back: Callable[[], None], *, again: bool = False
    ) -> None:
        """Waits until it is this caller's turn and `take` succeeds. The caller bounds the wait with a timeout.

        Args:
            take: takes what is needed and returns 0; or takes nothing and returns the seconds after which to try
                again, infinity if only `wake` can tell. Must not raise.
            give_back: undoes `take`, for a caller that is cancelled just as it was admitted.
            again: a further attempt of a request, which goes before first attempts of the same priority.
        """
        waiter = _Waiter(take, asyncio.get_running_loop().create_future(), again)
        if again:
            self._queue.push_front(priority, waiter, self._num_again[priority])
            self._num_again[priority] += 1
        else:
            self._queue.add(priority, waiter)
        self.wake()
        try:
            await waiter.admitted
        except asyncio.CancelledError:
            if self._queue.remove(priority, waiter):
                self._num_again[priority] -= again
            else:
                give_back()
            self.wake()  # it may have been next
            raise

    def wake(self) -> None:
        """Admits all for whom there is room. Call it after making room."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while (found := self._queue.peek()) is not None:
            priority, waiter = found
            delay = waiter.take()
            if delay > 0.0:
                if delay < math.inf:
                    self._timer = asyncio.get_running_loop().call_later(delay, self.wake)
                return
            self._queue.pop()
            self._num_again[priority] -= waiter.again
            if not waiter.admitted.done():  # else it is being cancelled, and gives back what was taken
                waiter.admitted.set_result(None)


class PrioritySemaphore(AdmissionQueue):
    """A semaphore whose waiters are served by priority. For one event loop."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self._free = number

    async def acquire(self, priority: Priority) -> None:
        """Waits for a slot. The caller bounds the wait with a timeout."""
        await self.admit(priority, self._take, self._give_back)

    def release(self) -> None:
        self._give_back()
        self.wake()

    def _take(self) -> float:
        if not self._free:
            return math.inf
        self._free -= 1
        return 0.0

    def _give_back(self) -> None:
        self._free += 1
