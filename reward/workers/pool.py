"""Worker processes for scorers that may hang or crash: user's functions and patterns, symbolic mathematics, code.

Items go to a process in chunks and answers come back one by one, so the item that hung or crashed is the first without
an answer. Its process is killed, and the rest of its chunk is judged by others. Any process can run any scorer.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Sequence
from contextlib import suppress

from tandem.protos.contracts import Score, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.config import RewardConfig
from tandem.reward.registry import ScorerSpec
from tandem.reward.scheduling.cancellation import CANCELLED, CLOSING
from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority, PriorityQueue
from tandem.reward.workers.launcher_process import Launchers
from tandem.reward.workers.requests import MAX_CHUNK_ITEMS, Request, encode
from tandem.reward.workers.worker_process import Outcome, WorkerProcess

_CHUNK_SECONDS = 0.02  # target length of a chunk: bounds how long a higher priority waits for a lower one
_FIRST_CHUNK_ITEMS = 8  # of a scorer that was not timed yet
_SHARED_SECONDS = 0.001  # a chunk of less is not split among workers
_BATCH_ITEMS = 64  # for a batch judge, which is faster with more items …
_BATCH_SHARE = 0.25  # … as long as a batch takes at most this share of one item's time limit
_MAX_PACES = 256
_WAIT_SECONDS = 1.0
_CHUNK_BYTES = 1 << 20


class ScorerPool:
    """Runs any number of scorers for any number of callers in `num_workers` processes. Thread-safe."""

    def __init__(self, config: RewardConfig) -> None:
        self.config = config
        self.launchers = Launchers(config)
        self.closing = False
        self.replaced_workers = 0
        self._work = threading.Condition()
        self._queue: PriorityQueue[Request] = PriorityQueue()
        self._open_requests: set[Request] = set()
        self._paces: OrderedDict[str, tuple[float, bool]] = OrderedDict()  # seconds per item; batches?
        self._figures: Counter[str] = Counter()
        self._failure: BaseException | None = None
        self._threads = [WorkerThread(self, f"scorer-{number}") for number in range(config.num_workers)]
        for thread in self._threads:
            thread.start()

    def load(self, spec: ScorerSpec) -> None:
        """Builds the judge in a worker. Raises ScorerError, one line without the place of the scorer, if it fails."""
        request = self.submit(spec, (), "ring")
        request.wait()
        if request.refusal:
            raise ScorerError(request.refusal)

    def submit(
        self, spec: ScorerSpec, items: Sequence[ScoreItem], priority: Priority, *, fresh: bool = False
    ) -> Request:
        """Starts scoring; `Request.wait` returns the scores. `fresh`: in a process that has judged nothing yet."""
        request = Request(spec, items, priority, self._check, fresh=fresh)
        with self._work:
            if self.closing:
                request.end(CLOSING.detail)
                return request
            self._open_requests.add(request)
            self._queue.add(priority, request)
            self._work.notify(max(1, len(items)))
        return request

    def score(self, spec: ScorerSpec, items: Sequence[ScoreItem], priority: Priority = "calls") -> list[Score]:
        """Scores the items and blocks. One result per item, in order."""
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
            self._open_requests.discard(request)

    def figures(self) -> dict[str, float]:
        with self._work:
            return {
                **{f"worker_items_{priority}": float(self._figures[priority]) for priority in PRIORITIES},
                **{f"calls_waiting_{priority}": float(self._queue.waiting(priority)) for priority in PRIORITIES},
                "workers_replaced": float(self.replaced_workers),
            }

    def close(self) -> None:
        """Kills the processes. Running calls return at once; items without a score are unscored (`infrastructure`)."""
        with self._work:
            self.closing = True
            self._work.notify_all()
        self.launchers.close()
        for thread in self._threads:
            thread.join(timeout=15.0)
        with self._work:
            for request in self._open_requests:
                request.end(CLOSING.detail)
            self._open_requests.clear()
            self._queue.clear()

    # ---- called by the threads ----

    def take(self) -> tuple[Request, list[int]] | None:
        """The next chunk of items; None when the pool closes."""
        with self._work:
            while not self.closing:
                found = self._queue.pop()
                if found is None:
                    self._work.wait(_WAIT_SECONDS)
                    continue
                priority, request = found
                numbers = request.cut(self._chunk_size(request))
                request.queued = bool(request.todo)
                if request.queued:
                    self._queue.add(priority, request)
                return request, numbers
        return None

    def settle(self, request: Request, numbers: list[int], scores: Sequence[Score]) -> list[int]:
        """Stores the scores of the first items, and returns the numbers of the others."""
        if scores:
            with self._work:
                self._figures[request.priority] += len(scores)
                if request.settle(numbers[: len(scores)], scores):
                    self._open_requests.discard(request)
        return numbers[len(scores) :]

    def put_back(self, request: Request, numbers: Sequence[int]) -> None:
        """Returns items that were taken but not judged to the front of the queue."""
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
        with self._work:
            request.end(refusal)
            self._open_requests.discard(request)

    def note_pace(self, request: Request, outcome: Outcome) -> None:
        if not outcome.answers:
            return
        seconds = outcome.seconds / len(outcome.answers)
        with self._work:
            before, _ = self._paces.pop(request.spec.key, (seconds, False))
            self._paces[request.spec.key] = max(1e-7, (before + seconds) / 2), outcome.batch
            if len(self._paces) > _MAX_PACES:
                self._paces.popitem(last=False)

    def note_replaced(self) -> None:
        with self._work:
            self.replaced_workers += 1

    def fail(self, error: BaseException) -> None:
        """Records a bug in a thread of the pool; every call raises it."""
        with self._work:
            self._failure = self._failure or error

    def _check(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the pool of scoring processes failed") from self._failure

    def _chunk_size(self, request: Request) -> int:
        """Size of the next chunk: its target length in time, at most the share of one worker."""
        pace, batch = self._paces.get(request.spec.key, (0.0, False))
        share = -(-len(request.todo) // self.config.num_workers)
        if not pace:
            return min(_FIRST_CHUNK_ITEMS, share)
        if batch:
            return max(1, min(_BATCH_ITEMS, share, int(_BATCH_SHARE * self.config.timeout_seconds / pace)))
        most = max(1, min(MAX_CHUNK_ITEMS, int(_CHUNK_SECONDS / pace)))
        return min(most, max(share, int(_SHARED_SECONDS / pace)))


class WorkerThread(threading.Thread):
    """A thread of the pool: takes chunks, has its worker process judge them, and replaces the process when needed."""

    def __init__(self, pool: ScorerPool, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._pool = pool
        self._process: WorkerProcess | None = None

    def run(self) -> None:
        try:
            while (taken := self._pool.take()) is not None:
                self._serve(*taken)
        except BaseException as error:  # a bug: every caller raises it
            self._pool.fail(error)
        finally:
            if self._process is not None:
                self._process.close()

    def _serve(self, request: Request, numbers: list[int]) -> None:
        if not request.items:
            self._load(request)
            return
        numbers, lines = self._encode(request, numbers)
        try:
            numbers = self._judge_all(request, numbers, lines)
        finally:
            request.at_work.pop(self.name, None)
        self._pool.put_back(request, numbers)

    def _judge_all(self, request: Request, numbers: list[int], lines: list[bytes]) -> list[int]:
        """Has the items judged and stores their scores; returns the numbers of those left for other workers."""
        while numbers and not (self._pool.closing or request.over):
            outcome, fresh = self._judge(request, lines, numbers)
            if self._pool.closing or request.over:  # a crash may come from the pool's end, or nobody waits
                self._pool.settle(request, numbers, outcome.answers)
                return []
            self._pool.note_pace(request, outcome)
            failed = outcome.end in ("item", "memory", "stray")
            if failed and outcome.batch and len(numbers) > 1 and not request.spec.grouped:
                request.max_items = len(numbers) // 2  # smaller batches find the item at fault
                break
            if outcome.end in ("memory", "stray") and not fresh:
                # Items judged earlier may have left something in the process: the item is retried in a fresh one.
                numbers, lines = self._pool.settle(request, numbers, outcome.answers), lines[len(outcome.answers) :]
                alone = len(numbers) if request.spec.grouped else 1
                self._pool.put_back(request, numbers[alone:])
                numbers, lines = numbers[:alone], lines[:alone]
                continue
            scores = outcome.answers + self._reasons(request, outcome, len(numbers) - len(outcome.answers))
            numbers, lines = self._pool.settle(request, numbers, scores), lines[len(scores) :]
            if outcome.end != "retry":
                request.max_items = min(MAX_CHUNK_ITEMS, 2 * request.max_items)
                break
        return numbers

    def _reasons(self, request: Request, outcome: Outcome, number_left: int) -> list[Score]:
        if outcome.end in ("done", "retry"):
            return []
        memory_bytes = self._pool.config.limits.memory_bytes
        reason = outcome.reason or Unscored("limit", f"more than {memory_bytes} bytes of memory")
        if outcome.end == "refused":
            # The judge loaded before, so this is the machine's fault (memory, processes, a missing file).
            return [Unscored("infrastructure", f"no scoring process: {reason.detail}")] * number_left
        return [reason] * (number_left if request.spec.grouped else 1)

    def _load(self, request: Request) -> None:
        while not self._pool.closing:
            outcome, _ = self._judge(request, [])
            if outcome.end != "retry":
                self._pool.loaded(request, outcome.reason.detail if outcome.reason else "")
                return

    def _judge(self, request: Request, lines: Sequence[bytes], numbers: Sequence[int] = ()) -> tuple[Outcome, bool]:
        """The outcome, and whether the process was fresh."""
        try:
            process = self._living(request.spec.preload, fresh=request.fresh)
        except OSError as error:
            return Outcome(end="refused", reason=Unscored("infrastructure", str(error))), True
        fresh = process.num_judged == 0
        answers: list[Score] = []
        request.at_work[self.name] = numbers, answers
        outcome = process.judge(request.spec, lines, request.given_up, answers)
        if not self._pool.closing:
            with suppress(OSError):  # reported to the next caller that needs the process
                self._living(request.spec.preload)  # a replacement is ready before it is needed
        return outcome, fresh and not outcome.answers

    def _living(self, preload: Sequence[str], *, fresh: bool = False) -> WorkerProcess:
        """This thread's process, replaced if it died or is not `fresh`. Raises OSError if none can be started."""
        if self._process is not None and self._process.alive and not (fresh and self._process.num_judged):
            return self._process
        if self._process is not None:
            self._process.close()
            self._process = None
            self._pool.note_replaced()
        self._process = self._pool.launchers.spawn(preload)
        return self._process

    def _encode(self, request: Request, numbers: list[int]) -> tuple[list[int], list[bytes]]:
        """Encodes the items of a chunk. Those that cannot be encoded are settled; those past its size limit go back."""
        good: list[int] = []
        lines: list[bytes] = []
        bad: dict[int, Score] = {}
        size = 0
        for place, number in enumerate(numbers):
            if size > _CHUNK_BYTES and not request.spec.grouped:
                self._pool.put_back(request, numbers[place:])
                break
            line = encode(request.items[number])
            if isinstance(line, bytes):
                good.append(number)
                lines.append(line)
                size += len(line)
            else:
                bad[number] = line
        self._pool.settle(request, list(bad), list(bad.values()))
        return good, lines
