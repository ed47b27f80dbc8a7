"""Spend cap of a judge."""

from __future__ import annotations

import math
from typing import Literal

from tandem.reward.scheduling.admission_queue import AdmissionQueue
from tandem.reward.scheduling.priority_queue import Priority

_NANO = 10**9  # amounts are whole billionths, so sums have no rounding errors


class SpendMeter:
    """Counts the money spent since the process started, in the currency of the prices.

    The highest possible price of a request is reserved before it, and the true price is charged after it, so spending
    never exceeds `most`. Used by the coroutines of one event loop.
    """

    def __init__(self, most: float | None) -> None:
        self._most = None if most is None else round(most * _NANO)  # None: no cap
        self._spent = 0
        self._reserved = 0
        self._queue = AdmissionQueue()

    @property
    def spent(self) -> float:
        """Money charged so far."""
        return self._spent / _NANO

    @property
    def reserved(self) -> float:
        """Money reserved for running requests."""
        return self._reserved / _NANO

    def offer(self, highest: float) -> Literal["granted", "later", "never"]:
        """Reserves the price if it fits (`granted`).

        `later`: it may fit once running requests are charged. `never`: it exceeds the cap.
        """
        price = _up(highest)
        if self._most is not None:
            if self._spent + price > self._most:
                return "never"
            if self._spent + self._reserved + price > self._most:
                return "later"
        self._reserved += price
        return "granted"

    async def reserve(self, highest: float, priority: Priority = "calls", *, again: bool = False) -> bool:
        """Reserves the price, by priority and then in order of arrival. Returns False if it exceeds the cap.

        The caller's time-out bounds the wait. `again`: a further attempt goes before the others of its priority.
        """
        granted = False

        def take() -> float:
            nonlocal granted
            answer = self.offer(highest)
            granted = answer == "granted"
            return math.inf if answer == "later" else 0.0

        def give_back() -> None:
            if granted:
                self.charge(highest, 0.0)

        await self._queue.acquire(priority, take, give_back, again=again)
        return granted

    def charge(self, reserved: float, price: float) -> None:
        """Ends a reservation and charges the request's price."""
        self._reserved -= _up(reserved)
        self._spent += _up(price)
        self._queue.wake()


def _up(price: float) -> int:
    return math.ceil(price * _NANO)
