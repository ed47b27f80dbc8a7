"""Reads items from whatever can be iterated over, at its own pace, and hands them out packed and cut into messages."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator

from tandem.protos.contracts import ScoreItem, Unscored
from tandem.services.clients.messages import Cutter, Limits, Packed, pack

Items = Iterable[ScoreItem | Unscored] | AsyncIterable[ScoreItem | Unscored]
"""An `Unscored` in an item's place says why that item cannot be judged; it keeps its place among the results."""


class ItemReader:
    """Messages out of a row of items. Plain iterables are read in another thread, so one that waits holds nothing up.

    `linger_seconds`: how long a message waits for more items before it goes without them; None: until it is full.
    `on_fault` is told the number of every item that cannot be judged, and why.
    """

    def __init__(
        self,
        items: Items,
        limits: Limits,
        linger_seconds: float | None = None,
        on_fault: Callable[[int, Unscored], None] = lambda index, fault: None,
    ) -> None:
        self._on_fault = on_fault
        self._limits = limits
        self._linger = linger_seconds
        self._lock = threading.Lock()
        self._cutter = Cutter(limits)
        self._plain: Iterator[ScoreItem | Unscored] | None = None
        self._arriving: AsyncIterator[ScoreItem | Unscored] | None = None
        if isinstance(items, AsyncIterable):
            self._arriving = aiter(items)
        else:
            self._plain = iter(items)
        self._ready: deque[list[Packed]] = deque()
        self._reading: asyncio.Future[None] | None = None
        self._ended = False
        self.num_items = 0
        """Items read so far."""

    async def next(self) -> list[Packed] | None:
        """The next message; None when there are no more. Raises what the iterable raises, and DataError as
        `Cutter.add`.
        """
        while True:
            with self._lock:
                if self._ready:
                    return self._ready.popleft()
                if self._ended:
                    return None
            if self._reading is None:
                read = asyncio.to_thread(self._read) if self._plain is not None else self._arrive()
                self._reading = asyncio.ensure_future(read)
            done, _ = await asyncio.wait({self._reading}, timeout=self._linger)
            if done:
                reading, self._reading = self._reading, None
                reading.result()
                continue
            with self._lock:
                early = [] if self._ready else self._cutter.take()
            if early:
                return early

    def close(self) -> None:
        """Reads no further."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._ended = True

    def _read(self) -> None:
        """Reads until a message is full; in another thread."""
        assert self._plain is not None
        while True:
            try:
                item = next(self._plain)
            except StopIteration:
                self._end()
                return
            if self._take(item):
                return

    async def _arrive(self) -> None:
        assert self._arriving is not None
        async for item in self._arriving:
            if self._take(item):
                return
        self._end()

    def _take(self, item: ScoreItem | Unscored) -> bool:
        """Whether messages are ready with this item."""
        with self._lock:
            packed = pack(self.num_items, item, self._limits)
            if packed.fault is not None:
                self._on_fault(packed.index, packed.fault)
            self._ready.extend(self._cutter.add(packed))
            self.num_items += 1
            return bool(self._ready)

    def _end(self) -> None:
        with self._lock:
            self._ready.extend(self._cutter.finish())
            self._ended = True
