"""Reads items from an iterable and returns them encoded, in batches."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator

from tandem.protos.contracts import ScoreItem, Unscored
from tandem.services.clients.messages import Batcher, EncodedItem, Limits, encode

Items = Iterable[ScoreItem | Unscored] | AsyncIterable[ScoreItem | Unscored]
"""An `Unscored` in place of an item says why the item cannot be scored; it keeps its place among the results."""


class ItemReader:
    """Batches of items from an iterable. A plain iterable is read in another thread, so it may block.

    Args:
        linger_seconds: how long an incomplete batch waits for more items. None: until it is full.
        on_fault: called with the number of every item that cannot be encoded, and the reason.
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
        self._batcher = Batcher(limits)
        self._plain: Iterator[ScoreItem | Unscored] | None = None
        self._arriving: AsyncIterator[ScoreItem | Unscored] | None = None
        if isinstance(items, AsyncIterable):
            self._arriving = aiter(items)
        else:
            self._plain = iter(items)
        self._ready: deque[list[EncodedItem]] = deque()
        self._reading: asyncio.Future[None] | None = None
        self._ended = False
        self.num_items = 0
        """Items read so far."""

    async def next(self) -> list[EncodedItem] | None:
        """The next batch; None after the last. Raises what the iterable raises, and DataError as `Batcher.add`."""
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
                early = [] if self._ready else self._batcher.flush()
            if early:
                return early

    def close(self) -> None:
        """Stops reading."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._ended = True

    def _read(self) -> None:
        """Reads until a batch is full. Runs in another thread."""
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
        """Adds an item. Returns whether batches are ready."""
        with self._lock:
            encoded = encode(self.num_items, item, self._limits)
            if encoded.fault is not None:
                self._on_fault(encoded.index, encoded.fault)
            self._ready.extend(self._batcher.add(encoded))
            self.num_items += 1
            return bool(self._ready)

    def _end(self) -> None:
        with self._lock:
            self._ready.extend(self._batcher.finish())
            self._ended = True
