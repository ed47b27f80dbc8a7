"""How often an endpoint may be asked: at most so many requests, and so many tokens, in any minute."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.reward.scheduling.admission_queue import AdmissionQueue
from tandem.reward.scheduling.priority_queue import Priority


@dataclass(slots=True, eq=False)
class Taken:
    """What was admitted, and when. `amount` changes once the true number is known."""

    at: float
    amount: int
    counts: bool = True
    """False once a window has passed over it."""


class RateLimit:
    """At most `most` units in any window of `window_seconds` (half open), whatever the moment it begins, and evenly
    within it.

    A bucket that refills at the full rate while it is emptied lets up to twice its size through in one window. So this
    is a bucket without burst (after each admission a pause in proportion to its size), which remembers besides what it
    admitted for the length of a
    window: the pause keeps waits short, the memory makes the bound exact for units of any size, and the full rate can
        be kept up. It reads no clock: `now`, in seconds, is the caller's and never goes back.
    """

    def __init__(self, most: int, window_seconds: float = 60.0) -> None:
        if most < 1 or not window_seconds > 0:
            raise ValueError("a rate limit is at least 1 unit in a window longer than 0 s")
        self.most = most
        self.window_seconds = window_seconds
        self._seconds_a_unit = window_seconds / most
        self._next_at = -math.inf
        self._taken: deque[Taken] = deque()
        self._used = 0

    def delay(self, amount: int, now: float) -> float:
        """Seconds until `amount` has room; 0: it has room now.

        Raises:
            ValueError: it never has.
        """
        if amount > self.most:
            raise ValueError(f"{amount} at once is more than {self.most} in {self.window_seconds:g} s")
        self._forget(now)
        pause = max(0.0, self._next_at - now)
        lacking = self._used + amount - self.most
        for taken in self._taken:
            if lacking <= 0:
                break
            lacking -= taken.amount
            pause = max(pause, taken.at + self.window_seconds - now)
        return pause

    def take(self, amount: int, now: float) -> Taken:
        """Admits `amount`; only right after `delay` said 0."""
        taken = Taken(now, amount)
        self._taken.append(taken)
        self._used += amount
        self._next_at = now + amount * self._seconds_a_unit
        return taken

    def settle(self, taken: Taken, amount: int) -> None:
        """Corrects an estimate: what was too much is free again, what was too little delays those who follow."""
        if taken.counts:
            self._used += amount - taken.amount
            self._next_at += (amount - taken.amount) * self._seconds_a_unit
        taken.amount = amount

    def _forget(self, now: float) -> None:
        while self._taken and self._taken[0].at + self.window_seconds <= now:
            oldest = self._taken.popleft()
            oldest.counts = False
            self._used -= oldest.amount


class RateLimiter:
    """Several limits at once, first come first served within a lane. Used by the coroutines of one event loop, whose
    clock it reads.
    """

    def __init__(self, limits: Sequence[RateLimit]) -> None:
        self._limits = tuple(limits)
        self._queue = AdmissionQueue()

    def waiting(self, priority: Priority) -> int:
        """How many wait for room, in a lane."""
        return self._queue.waiting(priority)

    async def take(self, amounts: Sequence[int], priority: Priority = "calls", *, again: bool = False) -> list[Taken]:
        """Waits for room in every limit, and takes it. The caller's time-out bounds the wait.

        Args:
            amounts: what is needed of each limit.
            priority: decides who is next, see `tandem.reward.scheduling.admission_queue`.
            again: for a further attempt: before the others of its lane.

        Raises:
            ValueError: a limit is smaller than what is asked of it.
        """
        wanted = list(zip(self._limits, amounts, strict=True))
        clock = asyncio.get_running_loop().time
        taken: list[Taken] = []

        def delay(now: float) -> float:
            return max((limit.delay(amount, now) for limit, amount in wanted), default=0.0)

        def take() -> float:
            now = clock()
            seconds = delay(now)
            if seconds <= 0.0:
                taken.extend(limit.take(amount, now) for limit, amount in wanted)
            return seconds

        delay(clock())  # what never has room is refused here, not when its turn comes
        await self._queue.acquire(priority, take, lambda: self.settle(taken, [0] * len(taken)), again=again)
        return taken

    def settle(self, taken: Sequence[Taken], amounts: Sequence[int]) -> None:
        """Corrects what `take` estimated."""
        for limit, one, amount in zip(self._limits, taken, amounts, strict=True):
            limit.settle(one, amount)
        self._queue.wake()
