"""Rate limits of an endpoint: requests and tokens per minute.

aiolimiter is not used, because its leaky bucket has no priorities, allows bursts, and cannot correct an estimated cost
once the true cost is known.
"""

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
    """An admission. `amount` is corrected once the true amount is known."""

    at: float
    amount: int
    counts: bool = True
    """False once the admission is older than the window."""


class RateLimit:
    """At most `most` units in any half-open window of `window_seconds`, spread evenly.

    A token bucket, which refills while it is emptied, admits up to twice its size in one window. This limit has no
    bursts: a pause proportional to its size follows each admission. The admissions of the last window are kept, so the
    bound is exact for amounts of any size, and the full rate can be used. It reads no clock: callers pass `now` in
    seconds, which must not decrease.
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
        """Seconds until `amount` can be admitted; 0: now.

        Raises:
            ValueError: the amount exceeds the limit.
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
        """Admits `amount`. Call it only right after `delay` returned 0."""
        taken = Taken(now, amount)
        self._taken.append(taken)
        self._used += amount
        self._next_at = now + amount * self._seconds_a_unit
        return taken

    def settle(self, taken: Taken, amount: int) -> None:
        """Corrects an estimate: an excess is returned, a shortfall delays later requests."""
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
    """Several limits at once. Requests are admitted by priority, then in order of arrival.

    Used by the coroutines of one event loop, whose clock it reads.
    """

    def __init__(self, limits: Sequence[RateLimit]) -> None:
        self._limits = tuple(limits)
        self._queue = AdmissionQueue()

    def waiting(self, priority: Priority) -> int:
        """Number of waiters of one priority."""
        return self._queue.waiting(priority)

    async def take(self, amounts: Sequence[int], priority: Priority = "calls", *, again: bool = False) -> list[Taken]:
        """Waits until every limit admits its amount. The caller bounds the wait with a timeout.

        Args:
            amounts: the amount for each limit.
            priority: decides who is next, see `tandem.reward.scheduling.admission_queue`.
            again: whether this is a further attempt, which goes before the others of its priority.

        Raises:
            ValueError: an amount exceeds its limit.
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

        delay(clock())  # refuses an amount over the limit at once, not when its turn comes
        await self._queue.acquire(priority, take, lambda: self.settle(taken, [0] * len(taken)), again=again)
        return taken

    def settle(self, taken: Sequence[Taken], amounts: Sequence[int]) -> None:
        """Corrects the estimates passed to `take`."""
        for limit, one, amount in zip(self._limits, taken, amounts, strict=True):
            limit.settle(one, amount)
        self._queue.wake()
