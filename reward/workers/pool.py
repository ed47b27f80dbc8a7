"""Worker processes for scorers that may hang or crash: user's functions and patterns, symbolic mathematics, code.

Items go to a process in chunks and answers come back one by one, which tells the culprit of a hang or a crash: the
first item without an answer. Its process is killed, and the rest of its chunk goes to others. Processes are bound to no
scorer.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence

from tandem.protos.contracts import Score, ScoreItem
from tandem.protos.errors import ScorerError
from tandem.reward.config import RewardConfig
from tandem.reward.registry import ScorerSpec
from tandem.reward.scheduling.cancellation import CANCELLED
from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority, PriorityQueue
from tandem.reward.workers.launcher_process import Launchers
from tandem.reward.workers.requests import MAX_CHUNK_ITEMS, Request
from tandem.reward.workers.worker_process import Limits, Outcome
from tandem.reward.workers.worker_thread import WorkerThread

STARTUP_SECONDS = 60.0
"""How long a judge may take to be built: user's modules import much."""
_CHUNK_SECONDS = 0.02  # what a chunk should take: bounds how long a higher priority waits for a lower one's
_FIRST_CHUNK_ITEMS = 8  # of a scorer whose pace is not known yet
_SHARED_SECONDS = 0.001  # a chunk of less is not made smaller for the sake of sharing it among workers
_BATCH_ITEMS = 64  # for a judge of batches: it is the faster the more it gets …
_BATCH_SHARE = 0.25  # … but its batch should take no more than this share of one item's time
_MAX_PACES = 256
_UNKNOWN = 0.0, False
_WAIT_SECONDS = 1.0


class ScorerPool:
    """`num_workers` processes for any number of scorers and callers. Thread-safe."""

    def __init__(self, config: RewardConfig, *, startup_seconds: float = STARTUP_SECONDS) -> None:
        self.limits = Limits.of(config, startup_seconds)
        self.launchers = Launchers(self.limits)
        self.closing = False
        self.replaced_workers = 0
        self._num_workers = config.num_workers
        self._work = threading.Condition()
        self._queue: PriorityQueue[Request] = PriorityQueue()
        self._open: set[Request] = set()
        self._paces: OrderedDict[str, tuple[float, bool]] = OrderedDict()  # seconds an item, and whether in batches
        self._figures: Counter[str] = Counter()
        self._failure: BaseException | None = None
        self._threads = [WorkerThread(self, f"scorer-{number}") for number in range(self._num_workers)]
        for thread in self._threads:
            thread.start()

    def load(self, spec: ScorerSpec) -> None:
        """Has a worker build the judge.

        Raises:
            ScorerError: it cannot be built; in one line, without the place.
        """
        request = self.submit(spec, (), "ring")
        request.wait()
        if request.refusal:
            raise ScorerError(request.refusal)

    def submit(self, spec: ScorerSpec, items: Sequence[ScoreItem], priority: Priority) -> Request:
        """Begins to score; `wait` of what it returns ends it. What hangs, crashes or breaks a limit is unscored
        alone.
        """
        request = Request(spec, items, priority, self._check)
        with self._work:
            if self.closing:
                request.end("the scorer is closing")
                return request
            self._open.add(request)
            self._queue.add(priority, request)
            self._work.notify(min(max(1, len(items)), self._num_workers))
        return request

    def score(self, spec: ScorerSpec, items: Sequence[ScoreItem], priority: Priority = "calls") -> list[Score]:
        """One result an item, in order. Blocks."""
        return self.submit(spec, items, priority).wait() if items else []

    def withdraw(self, request: Request) -> None:
        """Cancels a request. Items that no worker has begun leave the queue now, the others end soon after."""
        with self._work:
            if request.over:
                return
            if request.queued:
                self._queue.remove(request.priority, request)
                request.queued = False
            request.end(reason=CANCELLED)
            self._open.discard(request)

    def figures(self) -> dict[str, float]:
        """Sums since the start, and what waits now."""
        with self._work:
            return {
                **{f"worker_items_{priority}": float(self._figures[priority]) for priority in PRIORITIES},
                **{f"calls_waiting_{priority}": float(self._queue.waiting(priority)) for priority in PRIORITIES},
                "workers_replaced": float(self.replaced_workers),
            }

    def close(self) -> None:
        """Kills the processes; calls under way return at once, their rest unscored (`infrastructure`)."""
        with self._work:
            self.closing = True
            self._work.notify_all()
        self.launchers.close()
        for thread in self._threads:
            thread.join(timeout=15.0)
        self._end_requests()

    # ---- what the threads call ----

    def take(self) -> tuple[Request, list[int]] | None:
        """The next chunk; None when the pool closes."""
        with self._work:
            while not self.closing:
                found = self._queue.pop()
                if found is None:
                    self._work.wait(_WAIT_SECONDS)
                    continue
                priority, request = found
                numbers = request.cut(self._size(request))
                request.queued = bool(request.todo)
                if request.queued:
                    self._queue.add(priority, request)
                return request, numbers
        return None

    def settle(self, request: Request, numbers: Sequence[int], scores: Sequence[Score]) -> None:
        """Enters the results of some items."""
        with self._work:
            self._figures[request.priority] += len(numbers)
            if request.settle(numbers, scores):
                self._open.discard(request)

    def put_back(self, request: Request, numbers: Sequence[int]) -> None:
        """Returns items that were taken and not judged; they come next."""
        if not numbers:
            return
        with self._work:
            if request.over:
                return
            request.put_back(numbers)
            if not request.queued and not self.closing:
                request.queued = True
                self._queue.push_front(request.priority, request)
                self._work.notify()

    def loaded(self, request: Request, refusal: str) -> None:
        """Ends a request without items."""
        with self._work:
            request.end(refusal)
            self._open.discard(request)

    def pace(self, request: Request) -> float:
        """What an item of its scorer took lately, in seconds; 0 if none was judged yet."""
        return self._paces.get(request.spec.key, _UNKNOWN)[0]

    def note_pace(self, request: Request, outcome: Outcome) -> None:
        """Learns how long an item of this scorer takes."""
        if not outcome.answers:
            return
        seconds = outcome.seconds / len(outcome.answers)
        with self._work:
            before, _ = self._paces.pop(request.spec.key, (seconds, False))
            self._paces[request.spec.key] = max(1e-7, (before + seconds) / 2), outcome.batch
            if len(self._paces) > _MAX_PACES:
                self._paces.popitem(last=False)

    def note_replaced(self) -> None:
        """Counts a process that gave way to another."""
        with self._work:
            self.replaced_workers += 1

    def fail(self, error: BaseException) -> None:
        """A thread of the pool met a bug: every call raises it."""
        with self._work:
            self._failure = self._failure or error

    # ---- ----

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the pool of scoring processes failed") from self._failure

    def _size(self, request: Request) -> int:
        """So many items as should take a chunk's time, and no more than each worker's share of them."""
        pace, batch = self._paces.get(request.spec.key, _UNKNOWN)
        share = -(-len(request.todo) // self._num_workers)
        if not pace:
            return min(_FIRST_CHUNK_ITEMS, share)
        if batch:
            return max(1, min(_BATCH_ITEMS, share, int(_BATCH_SHARE * self.limits.seconds / pace)))
        most = max(1, min(MAX_CHUNK_ITEMS, int(_CHUNK_SECONDS / pace)))
        return min(most, max(share, int(_SHARED_SECONDS / pace)))

    def _end_requests(self) -> None:
        with self._work:
            for request in self._open:
                request.end("the scorer is closing")
            self._open.clear()
            self._queue.clear()
