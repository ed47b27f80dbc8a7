"""A scoring request to the pool of worker processes."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from tandem.protos.contracts import Score, ScoreItem, Unscored
from tandem.reward.registry import ScorerSpec
from tandem.reward.scheduling.cancellation import CLOSING
from tandem.reward.scheduling.priority_queue import Priority

MAX_ITEM_BYTES = 32 << 20
"""Limit of one item as JSON."""
MAX_CHUNK_ITEMS = 256
_WAIT_SECONDS = 1.0  # between two checks whether the pool still works
_GRACE_SECONDS = 1.0  # for a worker to finish cancelled items: killing its process costs more than most items


class Request:
    """The items of one call. Whoever changes `todo`, `scores` or `queued` holds the lock of the pool."""

    def __init__(
        self,
        spec: ScorerSpec,
        items: Sequence[ScoreItem],
        priority: Priority,
        check: Callable[[], None],
        *,
        fresh: bool = False,
    ) -> None:
        self.spec, self.items, self.priority = spec, items, priority
        self.fresh = fresh
        """Whether a process that has judged nothing yet judges it."""
        self.scores: list[Score | None] = [None] * len(items)
        self.todo: deque[tuple[int, ...]] = deque(_units(spec, items, range(len(items))))
        self.queued = True
        """Whether it is in the queue of the pool."""
        self.refusal = ""
        """Why the judge cannot be built; set by `ScorerPool.load` only."""
        self.max_items = MAX_CHUNK_ITEMS
        """Items per chunk. Halved when a batch fails, until the failing item is alone; doubled again afterwards."""
        self.missing = len(items)
        self.at_work: dict[str, tuple[Sequence[int], Sequence[Score]]] = {}
        """Chunks under way, by worker thread: item numbers, and the answers to the first of them so far."""
        self._check = check
        self._done = threading.Event()
        self._ended_at = math.inf

    def wait(self) -> list[Score]:
        """One result per item, in order. Raises RuntimeError if a bug ended the pool."""
        while not self._done.wait(_WAIT_SECONDS):
            self._check()
        return self.scores  # type: ignore[return-value]

    def settle(self, numbers: Sequence[int], scores: Iterable[Score]) -> bool:
        """Stores results; True if those were the last. Has no effect after the end."""
        if self.over:
            return True
        for number, score in zip(numbers, scores, strict=True):
            self.scores[number] = score
        self.missing -= len(numbers)
        if not self.missing:
            self._done.set()
        return not self.missing

    def end(self, refusal: str = "", reason: Unscored = CLOSING) -> None:
        """Ends the request: items without an answer are unscored for `reason`."""
        self.refusal = refusal
        for numbers, answers in list(self.at_work.values()):
            for number, score in zip(numbers, list(answers), strict=False):
                self.scores[number] = self.scores[number] or score
        self.scores = [reason if score is None else score for score in self.scores]
        self.missing = 0
        self.todo.clear()
        self._ended_at = time.monotonic()
        self._done.set()

    @property
    def over(self) -> bool:
        """Whether every item has a result, or the request was ended."""
        return self._done.is_set()

    def given_up(self, since: float) -> bool:
        """Whether to kill a process that has judged its items since `since` (it may have built the judge until then,
        which others need): one second after that, and after the end of the request.
        """
        return time.monotonic() > max(self._ended_at, since) + _GRACE_SECONDS

    def cut(self, size: int) -> list[int]:
        """Takes the next items and returns their numbers: at most `size`, unless one group has more."""
        size = min(size, self.max_items)
        numbers = list(self.todo.popleft()) if self.todo else []
        while self.todo and len(numbers) + len(self.todo[0]) <= size:
            numbers += self.todo.popleft()
        return numbers

    def put_back(self, numbers: Sequence[int]) -> None:
        self.todo.extendleft(reversed(list(_units(self.spec, self.items, numbers))))


def _units(spec: ScorerSpec, items: Sequence[ScoreItem], numbers: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """The smallest parts of a chunk: single items, or whole groups for a scorer that compares them."""

    def group_of(number: int) -> str:
        return items[number].group

    if not spec.grouped:
        yield from zip(numbers)
        return
    for group, found in groupby(sorted(numbers, key=group_of), key=group_of):
        members = tuple(found)
        yield from [members] if group else zip(members)


def encode(item: ScoreItem) -> bytes | Unscored:
    fields = (item.data_source, item.solution, item.ground_truth, dict(item.extra_info), item.group)
    try:
        line = _ENCODE(fields).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        return Unscored("invalid_input", f"the item is not JSON: {error}")
    if len(line) > MAX_ITEM_BYTES:
        return Unscored("invalid_input", f"the item takes {len(line)} bytes as JSON, above {MAX_ITEM_BYTES}")
    return line


_ENCODE = json.JSONEncoder(check_circular=False).encode
