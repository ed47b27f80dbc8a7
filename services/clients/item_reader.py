"""Reads items from an iterable and returns them encoded, in batches."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable, Coroutine, Iterable, Iterator
from functools import partial

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
        self._read_batch: Callable[[], Coroutine[object, object, None]]
        if isinstance(items, AsyncIterable):
            self._read_batch = partial(self._read_arriving, aiter(items))
        else:
            self._read_batch = partial(asyncio.to_thread, self._read_plain, iter(items))
        self._ready: deque[list[EncodedItem]] = deque()
        self._reading: asyncio.Future[None] | None = None
        self._ended = False
        self._num_items = 0

    async def next(self) -> list[EncodedItem] | None:
        """The next batch; None after the last. Raises what the iterable raises, and DataError as `Batcher.add`."""
        while True:
            with self._lock:
                if self._ready:
                    return self._ready.popleft()
                if self._ended:
                    return None
            if self._reading is None:
                self._reading = asyncio.ensure_future(self._read_batch())
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
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        self._ended = True

    def _read_plain(self, items: Iterator[ScoreItem | Unscored]) -> None:
        if not any(map(self._take, items)):
            self._end()

    async def _read_arriving(self, items: AsyncIterator[ScoreItem | Unscored]) -> None:
        async for item in items:
            if self._take(item):
                return
        self._end()

    def _take(self, item: ScoreItem | Unscored) -> bool:
        """Adds an item. Returns whether batches are ready."""
        with self._lock:
            encoded = encode(self._num_items, item, self._limits)
            if encoded.fault is not None:
                self._on_fault(encoded.index, encoded.fault)
            self._ready.extend(self._batcher.add(encoded))
            self._num_items += 1
            return bool(self._ready)

    def _end(self) -> None:
        with self._lock:
            self._ready.extend(self._batcher.finish())
            self._ended = True
