"""`asyncio.gather` for work of which all is wanted or nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import TypeVar

T = TypeVar("T")


async def gather_or_cancel(calls: Iterable[Coroutine[object, None, T]]) -> list[T]:
    """Runs the calls together. An error of one, or a cancellation, cancels the others; `asyncio.gather` lets them go
    on.
    """
    tasks = [asyncio.create_task(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
