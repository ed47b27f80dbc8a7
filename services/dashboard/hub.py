"""One look a second at each run that somebody watches, shared by all who watch it."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator

from anyio import to_thread

from tandem.services.dashboard.run_source import RunSource

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


class Watch:
    """Looks at one run while it has viewers, and hands each look to all of them."""

    def __init__(self, source: RunSource) -> None:
        self.source = source
        self._state = ""
        self._changed = asyncio.Condition()
        self._soon = asyncio.Event()
        self._viewers = 0
        self._looking: asyncio.Task[None] | None = None

    async def states(self) -> AsyncIterator[str]:
        """The run's state as JSON: at once, then after each look."""
        self._viewers += 1
        if self._looking is None or self._looking.done():
            self._state = ""
            self._looking = asyncio.create_task(self._look())
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: self._state)
                    state = self._state
                yield state
                async with self._changed:
                    await self._changed.wait()
        finally:
            self._viewers -= 1

    def look_soon(self) -> None:
        """Looks now: an order was given, whose effect its viewers wait for."""
        self._soon.set()

    async def _look(self) -> None:
        while self._viewers:
            self._soon.clear()
            try:
                state = json.dumps(await to_thread.run_sync(self.source.look), allow_nan=False)
            except Exception:  # the others go on; a bug in a look belongs in the log
                log.exception("%s cannot be shown", self.source.folder)
                state = self._state
            async with self._changed:
                self._state = state
                self._changed.notify_all()
            try:
                await asyncio.wait_for(self._soon.wait(), _LOOK_SECONDS)
            except TimeoutError:
                continue
