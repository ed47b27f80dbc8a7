"""What a judge may cost: a cap that holds whatever the answers turn out to cost."""

from __future__ import annotations

import asyncio
import math
from typing import Literal

_NANO = 10**9  # sums of whole billionths do not drift


class SpendMeter:
    """Counts money, in whatever currency the prices are. Before a request its highest possible price is set aside, after it the true one is
    charged: so what is spent never exceeds `most`, if no price exceeds what was set aside for it.

    It counts since the start of the process and is used by the coroutines of one event loop.
    """

    def __init__(self, most: float | None) -> None:
        self._most = None if most is None else round(most * _NANO)  # None: it only counts
        self._spent = 0
        self._reserved = 0
        self._turn = asyncio.Lock()
        self._changed = asyncio.Event()

    @property
    def spent(self) -> float:
        """Charged so far."""
        return self._spent / _NANO

    @property
    def reserved(self) -> float:
        """Set aside for requests under way."""
        return self._reserved / _NANO

    def offer(self, highest: float) -> Literal["granted", "later", "never"]:
        """Sets the price aside; or says that it may fit once requests under way are charged; or that it cannot any more."""
        price = _up(highest)
        if self._most is not None:
            if self._spent + price > self._most:
                return "never"
            if self._spent + self._reserved + price > self._most:
                return "later"
        self._reserved += price
        return "granted"

    async def reserve(self, highest: float) -> bool:
        """Sets the price aside, first come first served; False: it does not fit under the cap. The caller's time-out bounds the wait."""
        async with self._turn:
            while (answer := self.offer(highest)) == "later":
                self._changed.clear()
                await self._changed.wait()
            return answer == "granted"

    def charge(self, reserved: float, price: float) -> None:
        """Ends a reservation, and charges what the request cost."""
        self._reserved -= _up(reserved)
        self._spent += _up(price)
        self._changed.set()


def _up(price: float) -> int:
    return math.ceil(price * _NANO)
