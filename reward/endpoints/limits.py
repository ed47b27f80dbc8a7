"""What bounds the requests to an endpoint: requests and tokens per minute, and money.

aiolimiter is not used, because its leaky bucket has no priorities, allows bursts, and cannot correct an estimated cost
once the true cost is known. Limiter and meter are used by the coroutines of one event loop.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from tandem.reward.scheduling.admission_queue import AdmissionQueue
from tandem.reward.scheduling.priority_queue import Priority

_MINUTE = 60.0
_NANO = 10**9  # amounts of money are whole billionths, so sums have no rounding errors


@dataclass(slots=True, eq=False)
class Taken:
    """An admission. `amount` is corrected once the true amount is known."""

    at: float
    amount: int
    counts: bool = True
    """False once the admission is older than a minute."""


class RateLimit:
    """At most `most` units in any minute (half-open), spread evenly.

    A token bucket admits up to twice its size in one minute. This limit has no bursts: a pause proportional to its size
    follows each admission. The admissions of the last minute are kept, so the bound is exact and the full rate can be
    used. It reads no clock: callers pass `now` in seconds, which must not decrease.
    """

    def __init__(self, most: float) -> None:
        self.most = most
        self._seconds_a_unit = _MINUTE / most
        self._next_at = -math.inf
        self._taken: deque[Taken] = deque()
        self._used = 0

    def delay(self, amount: int, now: float) -> float:
        """Seconds until `amount` can be admitted; 0: now."""
        assert amount <= self.most, f"{amount} at once is more than {self.most} a minute"
        self._forget(now)
        pause = max(0.0, self._next_at - now)
        lacking = self._used + amount - self.most
        for taken in self._taken:
            if lacking <= 0:
                break
            lacking -= taken.amount
            pause = max(pause, taken.at + _MINUTE - now)
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
        while self._taken and self._taken[0].at + _MINUTE <= now:
            oldest = self._taken.popleft()
            oldest.counts = False
            self._used -= oldest.amount


class RateLimiter(AdmissionQueue):
    """Several limits at once. Requests are admitted by priority, then in order of arrival."""

    def __init__(self, limits: Sequence[RateLimit]) -> None:
        super().__init__()
        self._limits = tuple(limits)

    async def take(self, amounts: Sequence[int], priority: Priority = "calls", *, again: bool = False) -> list[Taken]:
        """Waits until every limit admits its amount; the caller bounds the wait. `again`: first in its priority."""
        wanted = list(zip(self._limits, amounts, strict=True))
        clock = asyncio.get_running_loop().time
        taken: list[Taken] = []

        def take() -> float:
            now = clock()
            seconds = max((limit.delay(amount, now) for limit, amount in wanted))
            if seconds <= 0.0:
                taken.extend(limit.take(amount, now) for limit, amount in wanted)
            return seconds

        await self.admit(priority, take, lambda: self.settle(taken, [0] * len(taken)), again=again)
        return taken

    def settle(self, taken: Sequence[Taken], amounts: Sequence[int]) -> None:
        for limit, one, amount in zip(self._limits, taken, amounts, strict=True):
            limit.settle(one, amount)
        self.wake()


class SpendMeter(AdmissionQueue):
    """Counts the money spent since the process started, in the currency of the prices; `most` 0: no cap.

    The highest price of a request is reserved before it and the true one charged after it: `most` is never exceeded.
    """

    def __init__(self, most: float) -> None:
        super().__init__()
        self._most = round(most * _NANO) if most else math.inf
        self._spent = 0
        self._reserved = 0

    @property
    def spent(self) -> float:
        """Money charged so far."""
        return self._spent / _NANO

    async def reserve(self, highest: float, priority: Priority = "calls", *, again: bool = False) -> bool:
        """Reserves the price, in turn as `RateLimiter.take`. Returns False if it exceeds the cap."""
        price, granted = _up(highest), False

        def take() -> float:
            nonlocal granted
            if self._spent + price > self._most:
                return 0.0
            if self._spent + self._reserved + price > self._most:
                return math.inf  # it may fit once running requests are charged
            self._reserved += price
            granted = True
            return 0.0

        def give_back() -> None:
            if granted:
                self.charge(highest, 0.0)

        await self.admit(priority, take, give_back, again=again)
        return granted

    def charge(self, reserved: float, price: float) -> None:
        """Ends a reservation and charges the request's price."""
        self._reserved -= _up(reserved)
        self._spent += _up(price)
        self.wake()


def _up(price: float) -> int:
    return math.ceil(price * _NANO)
