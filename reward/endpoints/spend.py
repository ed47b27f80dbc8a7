"""What a judge may cost: a cap that holds whatever the answers turn out to cost."""

from __future__ import annotations

import math
from typing import Literal

from tandem.reward.scheduling.admission_queue import AdmissionQueue
from tandem.reward.scheduling.priority_queue import Priority

_NANO = 10**9  # sums of whole billionths do not drift


class SpendMeter:
    """Counts money, in whatever currency the prices are. Before a request its highest possible price is set aside,
    after it the true one is
    charged: so what is spent never exceeds `most`, if no price exceeds what was set aside for it.

    It counts since the start of the process and is used by the coroutines of one event loop.
    """

    def __init__(self, most: float | None) -> None:
        self._most = None if most is None else round(most * _NANO)  # None: it only counts
        self._spent = 0
        self._reserved = 0
        self._queue = AdmissionQueue()

    @property
    def spent(self) -> float:
        """Charged so far."""
        return self._spent / _NANO

    @property
    def reserved(self) -> float:
        """Set aside for requests under way."""
        return self._reserved / _NANO

    def offer(self, highest: float) -> Literal["granted", "later", "never"]:
        """Sets the price aside; or says that it may fit once requests under way are charged; or that it cannot any
        more.
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
        """Sets the price aside, first come first served within a priority; False: it exceeds the cap.

        The caller's time-out bounds the wait. `again`: for a further attempt, before the others of its lane.
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
        """Ends a reservation, and charges what the request cost."""
        self._reserved -= _up(reserved)
        self._spent += _up(price)
        self._queue.wake()


def _up(price: float) -> int:
    return math.ceil(price * _NANO)
