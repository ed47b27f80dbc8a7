"""A thread of the pool: it takes chunks, has a worker process judge them, and replaces the process when it must."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from tandem.protos.contracts import Score, Unscored
from tandem.reward.workers.launcher_process import Launchers
from tandem.reward.workers.requests import MAX_CHUNK_ITEMS, Request, encode
from tandem.reward.workers.worker_process import Limits, Outcome, WorkerProcess

_CHUNK_BYTES = 1 << 20


class Source(Protocol):
    """The pool, as its threads see it."""

    limits: Limits
    launchers: Launchers
    closing: bool

    def take(self) -> tuple[Request, list[int]] | None: ...

    def settle(self, request: Request, numbers: Sequence[int], scores: Sequence[Score]) -> None: ...

    def put_back(self, request: Request, numbers: Sequence[int]) -> None: ...

    def loaded(self, request: Request, refusal: str) -> None: ...

    def pace(self, request: Request) -> float: ...

    def note_pace(self, request: Request, outcome: Outcome) -> None: ...

    def note_replaced(self) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class WorkerThread(threading.Thread):
    """Owns at most one process. An item costs no more than itself: what stood behind it in its chunk goes back to the
    pool.
    """

    def __init__(self, pool: Source, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._pool = pool
        self._process: WorkerProcess | None = None

    def run(self) -> None:
        """Until the pool closes."""
        try:
            while (taken := self._pool.take()) is not None:
                self._serve(*taken)
        except BaseException as error:  # a bug: whoever waits for scores is told
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
        """Has the items judged, and settles them; the numbers of those that are for others to judge."""
        while numbers and not (self._pool.closing or request.over):
            outcome, fresh = self._judge(request, lines, numbers)
            if self._pool.closing or request.over:  # what looks like a crash was the pool's end, or nobody's concern
                self._settle(request, numbers, outcome.answers)
                return []
            self._pool.note_pace(request, outcome)
            failed = outcome.end in ("item", "memory", "stray")
            if failed and outcome.batch and len(numbers) > 1 and not request.spec.grouped:
                request.max_items = len(numbers) // 2  # smaller batches find the culprit
                break
            if outcome.end in ("memory", "stray") and not fresh:
                # The process had judged others before, which may have left something: the item gets one of its own
                # before it is blamed.
                numbers, lines = self._settle(request, numbers, outcome.answers), lines[len(outcome.answers) :]
                alone = len(numbers) if request.spec.grouped else 1
                self._pool.put_back(request, numbers[alone:])
                numbers, lines = numbers[:alone], lines[:alone]
                continue
            scores = outcome.answers + self._reasons(request, outcome, len(numbers) - len(outcome.answers))
            numbers, lines = self._settle(request, numbers, scores), lines[len(scores) :]
            if outcome.end != "retry":
                request.max_items = min(MAX_CHUNK_ITEMS, 2 * request.max_items)
                break
        return numbers

    def _reasons(self, request: Request, outcome: Outcome, number_left: int) -> list[Score]:
        """What the outcome says of the first items without an answer."""
        if outcome.end in ("done", "retry"):
            return []
        reason = outcome.reason or Unscored("limit", f"more than {self._pool.limits.memory_bytes} bytes of memory")
        if outcome.end == "refused":
            # It did load at first: what fails now is the machine (memory, processes, a file that went), not the answer.
            return [Unscored("infrastructure", f"no scoring process: {reason.detail}")] * number_left
        return [reason] * (number_left if request.spec.grouped else 1)

    def _load(self, request: Request) -> None:
        while not self._pool.closing:
            outcome, _ = self._judge(request, [])
            if outcome.end != "retry":
                self._pool.loaded(request, outcome.reason.detail if outcome.reason is not None else "")
                return

    def _judge(self, request: Request, lines: Sequence[bytes], numbers: Sequence[int] = ()) -> tuple[Outcome, bool]:
        """The outcome, and whether the process had judged nothing before."""
        try:
            process = self._living(request.spec.preload)
        except OSError as error:
            return Outcome(end="refused", reason=Unscored("infrastructure", str(error))), True
        fresh = process.num_judged == 0
        answers: list[Score] = []
        request.at_work[self.name] = numbers, answers
        outcome = process.judge(request.spec, lines, self._pool.pace(request), request.given_up, answers)
        if not self._pool.closing:
            with suppress(OSError):  # whoever needs the process is told
                self._living(request.spec.preload)  # the next one is there before it is asked for
        return outcome, fresh and not outcome.answers

    def _living(self, preload: Sequence[str]) -> WorkerProcess:
        """This thread's process, replaced if it died. Raises OSError if there is none to be had."""
        if self._process is not None and self._process.alive:
            return self._process
        if self._process is not None:
            self._process.close()
            self._process = None
            self._pool.note_replaced()
        self._process = self._pool.launchers.spawn(preload)
        return self._process

    def _encode(self, request: Request, numbers: list[int]) -> tuple[list[int], list[bytes]]:
        """The chunk's items as lines; those that cannot be any are settled, those beyond a chunk's bytes given back."""
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
        if bad:
            self._pool.settle(request, list(bad), list(bad.values()))
        return good, lines

    def _settle(self, request: Request, numbers: list[int], scores: Sequence[Score]) -> list[int]:
        """Enters the scores of the first items, and returns the numbers of the others."""
        if scores:
            self._pool.settle(request, numbers[: len(scores)], scores)
        return numbers[len(scores) :]
