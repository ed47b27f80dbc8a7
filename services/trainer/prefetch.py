"""The next batch on rank 0: a thread claims, reads, records and prepares it while the batch before it is trained."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass

from tandem.protos.codec import EncodedGroups
from tandem.protos.types import TrainBatch, TrajectoryGroup
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.process import SerialExecutor
from tandem.services.trainer.batch_source import BatchSource
from tandem.trainer.batch.prepared import PreparedBatch
from tandem.trainer.batch.record import write_record

_POLL_SECONDS = 1.0
_CLOSE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class RecordedBatch:
    """A batch on disk whose groups are still claimed in the ledger."""

    prepared: PreparedBatch
    as_json: Mapping[str, object]
    rejections: Mapping[str, float]
    """Figures of the groups that selection rejected while the batch was filled."""


class Prefetch:
    """Records one batch ahead of the one that is trained, and none beyond the last one of the run, in a thread that it
    alone uses.

    The groups stay outstanding and are selected as of the version that their batch starts from, so neither the limiter
    nor staleness changes. Without credits for a second batch (S = 0), the thread waits until the version before is
    published.
    """

    def __init__(
        self,
        thread: SerialExecutor,
        source: BatchSource,
        buffer: Buffer,
        recipe: Recipe,
        incarnation: int,
        prepare: Callable[[TrainBatch, Mapping[str, TrajectoryGroup]], PreparedBatch],
    ) -> None:
        self._source = source
        self._prepare = prepare
        self._buffer = buffer
        self._recipe = recipe
        self._incarnation = incarnation
        self._closed = threading.Event()
        self._is_last = threading.Event()
        self._thread = thread
        self._running: Future[RecordedBatch | None] | None = None

    def next_batch(self, version: int, seconds: float) -> RecordedBatch | None:
        """The batch that follows `version`, whose successor is begun at once. None if it is not there in time, on stop,
        or if no group is left (`exhausted`). Raises the error that ended the thread.
        """
        if self._running is None:
            if self.is_ending:
                return None
            self._running = self._thread.submit(self._record_next, version)
        if not wait([self._running], seconds).done:
            return None
        ended, self._running = self._running, None
        recorded = ended.result()
        if recorded is not None and version + 1 < self._recipe.run.total_batches and not self.is_ending:
            self._running = self._thread.submit(self._record_next, version + 1)
        return recorded

    @property
    def exhausted(self) -> bool:
        """Whether no batch will follow: no group is left, or no batch is wanted, and none is being recorded."""
        return self._running is None and (self._source.exhausted or self.is_ending)

    @property
    def is_ending(self) -> bool:
        """Whether `end` was called."""
        return self._is_last.is_set()

    def end(self) -> None:
        """Begins no further batch; what is being recorded is trained. Called from any thread."""
        self._is_last.set()

    def close(self) -> None:
        """Waits until the thread does nothing more. It may first finish a record."""
        self._closed.set()
        if self._running is not None:
            wait([self._running], _CLOSE_SECONDS)

    def _record_next(self, version: int) -> RecordedBatch | None:
        batch = None
        while batch is None:
            batch = self._source.poll(version, _POLL_SECONDS)
            if self._closed.is_set() or (batch is None and self._source.ended):
                return None
        payloads = self._buffer.read(batch.group_ids)
        encoded = EncodedGroups.of(dict(zip(batch.group_ids, payloads, strict=True)))
        groups = encoded.decode()
        self._buffer.check_incarnation(self._incarnation)
        if self._closed.is_set():
            return None
        as_json = write_record(self._recipe.folder, batch, encoded)
        if self._closed.is_set():
            return None
        return RecordedBatch(self._prepare(batch, groups), as_json, self._source.take_rejections())
