"""The feed: reads the dataset, shuffles it by seed and epoch, admits groups within the limits, and marks its end."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable
from concurrent.futures import wait
from functools import lru_cache
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tandem.protos.codec import encode_group
from tandem.protos.errors import DataError, ModelError
from tandem.protos.types import TrajectoryGroup
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.types import Admission
from tandem.services.config import Recipe
from tandem.services.data.dataset import Mixture, PromptBuilder, Row, RowFault
from tandem.services.logging_setup import configure_logging
from tandem.services.metrics.tracing import add_spans
from tandem.services.process import in_thread, starting, stop_event
from tandem.services.run.endpoint import run_buffer, service_endpoint
from tandem.services.service_info import ServiceInfo

log = logging.getLogger(__name__)

_CHUNK_GROUPS = 64  # per admission, so that no call to Redis is large
_CHUNK_ROWS = 1024  # between two looks at the event that stops the feed
_POLL_SECONDS = 0.25  # the longest delay of what sends no signal
_STOP_SECONDS = 1.0
_MAX_LOGGED_FAULTS = 20


@lru_cache(maxsize=1)
def epoch_order(seed: int, epoch: int, num_rows: int) -> NDArray[np.int64]:
    """Returns the row numbers of one epoch, shuffled by (seed, epoch). Equal on all machines and after restarts."""
    entropy = [seed & (2**64 - 1), epoch]  # two's complement, so negative seeds work
    # numpy keeps the raw bits of PCG64 stable over versions, but not `Generator.permutation`.
    keys = np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(num_rows)
    return np.argsort(keys, kind="stable")


class PreparedGroup(NamedTuple):
    """A group ready for admission. `position` counts rows from the run's start, including skipped rows."""

    position: int
    group_id: str
    payload: bytes


class PromptStream:
    """The recipe's prompts from a position on, endless or `max_epochs` long. Raises DataError or ModelError."""

    def __init__(self, recipe: Recipe, position: int) -> None:
        self.faults: dict[int, RowFault] = {}
        self._set_aside: frozenset[int] = frozenset()
        self._unusable: set[int] = set()
        """The rows of `faults` and those that are set aside."""
        self._dataset = Mixture(recipe.data.train_files)
        rollout = recipe.rollout
        self._builder = PromptBuilder(recipe, num_samples=rollout.samples_per_prompt)
        self._seed = recipe.run.seed
        self._shuffle = recipe.data.shuffle
        self._end = recipe.data.max_epochs * len(self._dataset) if recipe.data.max_epochs else None
        self.position = position
        """The position after the last group that was taken by `advance`."""
        self._next = position
        self._ready: deque[PreparedGroup] = deque()

    @property
    def finished(self) -> bool:
        """Whether the last epoch has no prompts left."""
        return not self._ready and self._end is not None and self._next >= self._end

    def prepare(self, num_groups: int) -> None:
        """Builds prompts until `num_groups` are ready or the last epoch ends, but reads at most `_CHUNK_ROWS` rows.

        Raises DataError if no row can be used (ModelError if the chat template is the cause).
        """
        last = self._next + _CHUNK_ROWS if self._end is None else min(self._next + _CHUNK_ROWS, self._end)
        while len(self._ready) < num_groups and self._next < last:
            epoch, index = divmod(self._next, len(self._dataset))
            if self._shuffle:
                index = int(epoch_order(self._seed, epoch, len(self._dataset))[index])
            group = self._build(epoch, index)
            if group is not None:
                self._ready.append(PreparedGroup(self._next, group.group_id, encode_group(group)))
            elif len(self._unusable) == self._dataset.num_rows:
                raise self._nothing_left()
            self._next += 1

    def run(self, num_groups: int) -> list[PreparedGroup]:
        """Returns up to `num_groups` next groups with consecutive positions; none after many rows without a prompt.

        The buffer stores one cursor and counts back from it if it admits only a part, so no row may be skipped.
        """
        self.prepare(num_groups)
        ready = enumerate(islice(self._ready, num_groups))
        return [group for number, group in ready if group.position == self._ready[0].position + number]

    def advance(self, num_groups: int) -> None:
        for _ in range(num_groups):
            self.position = self._ready.popleft().position + 1

    def move(self, position: int) -> None:
        """Goes on at another position."""
        self._ready.clear()
        self.position = self._next = position

    def set_aside(self, group_ids: Iterable[str]) -> None:
        """Skips the rows of these groups, and only these, from the present position on."""
        instances = [(int(epoch), int(index)) for epoch, _, index in (name.partition("-") for name in group_ids)]
        self._set_aside = frozenset(self._dataset.locate(index, epoch) for epoch, index in instances)
        self._unusable = set(self._set_aside).union(self.faults)
        self.move(self.position)  # groups of the next epoch may be ready

    def _nothing_left(self) -> DataError | ModelError:
        if not self._set_aside:
            return self._builder.nothing_usable(self._dataset.name, self.faults)
        fault = f"the prompts of {len(self._set_aside)} rows failed in every attempt"
        return DataError(
            f"dataset {self._dataset.name} has no usable row left: {fault}; see `tandem ledger RUN --dropped`, mend "
            "the rows or the scorer, and start a new run"
        )

    def _build(self, epoch: int, index: int) -> TrajectoryGroup | None:
        number = self._dataset.locate(index, epoch)
        if number in self._unusable:
            return None
        row = self._dataset.row(index, epoch)
        prompt = self._builder.build(row, epoch) if isinstance(row, Row) else row
        if isinstance(prompt, RowFault):
            self.faults[number] = prompt
            self._unusable.add(number)
            if len(self.faults) <= _MAX_LOGGED_FAULTS:
                last = "; further rows are counted only" if len(self.faults) == _MAX_LOGGED_FAULTS else ""
                log.warning("row %d is skipped: %s: %s%s", prompt.index, prompt.reason, prompt.detail, last)
            return None
        return TrajectoryGroup(prompt)


class Feed:
    """Admits groups while there are credits, until the run has enough groups or the data ends."""

    def __init__(self, buffer: Buffer, stream: PromptStream) -> None:
        self._buffer = buffer
        self._stream = stream
        self._exhausted = ""
        self._num_set_aside = 0
        self.admitted = 0
        self.waiting_seconds = 0.0
        self.activity = "starting"

    def run(self, stop: threading.Event) -> None:
        """Admits groups until told to stop. When exhausted, it keeps running to replace groups dropped later."""
        while not stop.is_set():
            admission = self._buffer.admission()
            if self._admit(admission):
                continue
            started = time.monotonic()
            if admission.wanted > 0:
                self._stream.prepare(_CHUNK_GROUPS)  # for when credits return
            self._buffer.connection.wait_for_signal("signal:credits", _POLL_SECONDS)
            self.waiting_seconds += time.monotonic() - started

    def _admit(self, admission: Admission) -> bool:
        """Admits as many groups as possible now. Returns False if it has to wait."""
        if admission.cursor != self._stream.position:
            words = "the saved position is %d, not %d: admits from there"
            log.warning(words, admission.cursor, self._stream.position)
            self._stream.move(admission.cursor)
            self._exhausted = ""
        if admission.num_set_aside != self._num_set_aside:
            self._num_set_aside = admission.num_set_aside
            self._stream.set_aside(self._buffer.set_aside())
            log.warning("%d prompts failed in every attempt: no later epoch admits them", self._num_set_aside)
        if admission.wanted <= 0:
            self._mark_exhausted("target", "the run has all the groups it needs")
            return False
        self._exhausted = self._exhausted if self._exhausted == "dataset" else ""
        if self._stream.finished:
            self._mark_exhausted("dataset", "the last epoch is over (data.max_epochs)")
            return False
        if admission.free <= 0:
            self.activity = "waiting for credits"
            return False
        groups = self._stream.run(min(admission.free, admission.wanted, _CHUNK_GROUPS))
        if not groups:
            return True  # many rows were skipped: the next call reads on, or marks the end
        began = time.time_ns()
        offered = [(group.group_id, group.payload) for group in groups]
        number = self._buffer.admit(offered, groups[-1].position + 1, after=self._stream.position)
        add_spans("admit", self._buffer.run_id, [group.group_id for group in groups[:number]], began, {})
        self._stream.advance(number)
        self.admitted += number
        self.activity = "admitting"
        return number > 0

    def _mark_exhausted(self, why: Literal["target", "dataset"], activity: str) -> None:
        is_marked = self._buffer.mark_exhausted(why)  # each time: Redis may have lost the mark
        if is_marked and self._exhausted != why:
            self._exhausted = why
            log.info("exhausted (%s): %s; %d groups admitted by this process", why, activity, self.admitted)
        self.activity = activity

    def figures(self) -> dict[str, float]:
        """Returns sums since the process's start, for heartbeat and Info."""
        skipped = Counter(fault.reason for fault in list(self._stream.faults.values()))  # it grows
        return {
            "groups_admitted": self.admitted,
            "waiting_seconds": self.waiting_seconds,
            "rows_skipped": skipped.total(),
            **{f"rows_skipped:{reason}": number for reason, number in skipped.items()},
        }


def main(recipe: Recipe, redis_url: str) -> None:
    """Runs the feed until SIGTERM, or until the run ends.

    Raises UserError if dataset, model, chat template or port cannot be used, TandemError if Redis is unreachable.
    """
    configure_logging("feed", run=recipe.run.run_id)
    with starting():  # loads the tokenizer; SIGTERM ends the process meanwhile
        stream = PromptStream(recipe, 0)
    stop = stop_event()
    buffer = run_buffer(recipe, redis_url, stop)
    stream.move(buffer.admission().cursor)
    feed = Feed(buffer, stream)
    with service_endpoint(ServiceInfo("feed", feed.figures, lambda: feed.activity, buffer), recipe, stop):
        # In a thread: a Redis that hangs keeps a call, and a stop, waiting.
        admitting = in_thread("admissions", feed.run, stop)
        admitting.add_done_callback(lambda _: stop.set())
        stop.wait()
        if wait([admitting], _STOP_SECONDS).done:
            admitting.result()
        else:
            log.warning("ends in the middle of a call (%s); Redis is at %s", feed.activity, buffer.place)
