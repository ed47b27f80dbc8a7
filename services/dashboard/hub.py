"""One look a second at each run that somebody watches, shared by all who watch it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress

from anyio import to_thread

from tandem.services.dashboard.run_source import RunSource

_LOOK_SECONDS = 1.0


class Watch:
    """Looks at one run while it has viewers, and hands each look to all of them."""

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self._state = ""
        self._looks = 0
        self._changed = asyncio.Condition()
        self._soon = asyncio.Event()
        self._viewers = 0
        self._looking: asyncio.Task[None] | None = None

    async def states(self) -> AsyncIterator[str]:
        """The run's state as JSON: at once, then after each look. Raises what a look raised."""
        self._viewers += 1
        if self._looking is None or self._looking.done():
            self._looks = 0
            self._looking = asyncio.create_task(self._look())
        looking, seen = self._looking, 0
        try:
            while True:
                async with self._changed:
                    while self._looks == seen and not looking.done():
                        await self._changed.wait()
                    if looking.done():
                        looking.result()
                        return
                    state, seen = self._state, self._looks
                yield state
        finally:
            self._viewers -= 1

    def look_soon(self) -> None:
        """Looks now: an order was given, whose effect its viewers wait for."""
        self._soon.set()

    async def _look(self) -> None:
        try:
            while self._viewers:
                self._soon.clear()
                state = json.dumps(await to_thread.run_sync(self.source.look), allow_nan=False)
                async with self._changed:
                    self._state, self._looks = state, self._looks + 1
                    self._changed.notify_all()
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._soon.wait(), _LOOK_SECONDS)
        finally:
            async with self._changed:
                self._changed.notify_all()
