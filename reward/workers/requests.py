"""Items of one call on their way through the pool of worker processes."""

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
from tandem.reward.scheduling.priority_queue import Priority

MAX_ITEM_BYTES = 32 << 20
"""Of one item as JSON."""
MAX_CHUNK_ITEMS = 256
CLOSING = Unscored("infrastructure", "the scorer is closing")
_WAIT_SECONDS = 1.0  # between two looks at whether the pool still lives
_LATE_SECONDS = 1.0  # for what a worker has begun when nobody wants it any more: a process costs more than most items


class Request:
    """What is asked of the pool at once. The pool's lock is held wherever `todo`, `scores` and `queued` change."""

    def __init__(
        self, spec: ScorerSpec, items: Sequence[ScoreItem], priority: Priority, check: Callable[[], None]
    ) -> None:
        self.spec, self.items, self.priority = spec, items, priority
        self.scores: list[Score | None] = [None] * len(items)
        self.todo: deque[tuple[int, ...]] = deque(_units(spec, items))
        self.queued = True
        """Whether it waits in the queue."""
        self.refusal = ""
        """Why the judge cannot be built, for a request without items."""
        self.max_items = MAX_CHUNK_ITEMS
        """Of a chunk. Halved when a judge of batches fails, until the culprit stands alone; then doubled again."""
        self.missing = len(items)
        self.at_work: dict[str, tuple[Sequence[int], Sequence[Score]]] = {}
        """What workers have in hand, by their threads: the numbers of a chunk, and the answers to the first of them so
        far.
        """
        self._check = check
        self._done = threading.Event()
        self._ended_at = math.inf

    def wait(self) -> list[Score]:
        """One score an item, in order. Raises RuntimeError if a bug ended the pool."""
        while not self._done.wait(_WAIT_SECONDS):
            self._check()
        return self.scores  # type: ignore[return-value]

    def settle(self, numbers: Sequence[int], scores: Iterable[Score]) -> bool:
        """Enters results; True if those were the last. Nothing changes after the end."""
        if self.over:
            return True
        for number, score in zip(numbers, scores, strict=True):
            self.scores[number] = score
        self.missing -= len(numbers)
        if not self.missing:
            self._done.set()
        return not self.missing

    def end(self, refusal: str = "", reason: Unscored = CLOSING) -> None:
        """Nothing more comes: what has no answer is unscored for the reason; if none is given, because the pool
        closes.
        """
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
        """Whether every item has its result, or nobody wants one any more."""
        return self._done.is_set()

    def given_up(self, since: float) -> bool:
        """Whether a process that has been at its items since then should be ended: it was to be done a second after the
        end, or after its begin if it had to build the judge until then. Or it would be ended with a judge just built,
        which others need.
        """
        return time.monotonic() > max(self._ended_at, since) + _LATE_SECONDS

    def cut(self, size: int) -> list[int]:
        """The numbers of the next items, at most `size` unless one unit has more."""
        size = min(size, self.max_items)
        numbers = list(self.todo.popleft()) if self.todo else []
        while self.todo and len(numbers) + len(self.todo[0]) <= size:
            numbers += self.todo.popleft()
        return numbers

    def put_back(self, numbers: Sequence[int]) -> None:
        """What was cut and not judged comes next again."""
        if self.spec.grouped:
            self.todo.extendleft(reversed(list(_units(self.spec, self.items, numbers))))
        else:
            self.todo.extendleft((number,) for number in reversed(numbers))


def _units(
    spec: ScorerSpec, items: Sequence[ScoreItem], numbers: Sequence[int] | None = None
) -> Iterable[tuple[int, ...]]:
    """What must not be parted: items one by one, or whole groups of a scorer that compares them."""
    numbers = range(len(items)) if numbers is None else numbers
    if not spec.grouped:
        yield from ((number,) for number in numbers)
        return
    for group, members in groupby(sorted(numbers, key=lambda one: items[one].group), key=lambda one: items[one].group):
        if group:
            yield tuple(members)
        else:
            yield from ((number,) for number in members)


def encode(item: ScoreItem) -> bytes | Unscored:
    """The item as a line of JSON for a worker, or why it cannot be one."""
    fields = (item.data_source, item.solution, item.ground_truth, dict(item.extra_info), item.group)
    try:
        line = _ENCODE(fields).encode() + b"\n"
    except (TypeError, ValueError, RecursionError) as error:
        return Unscored("invalid_input", f"the item is not JSON: {error}")
    if len(line) > MAX_ITEM_BYTES:
        return Unscored("invalid_input", f"the item takes {len(line)} bytes as JSON, above {MAX_ITEM_BYTES}")
    return line


_ENCODE = json.JSONEncoder(check_circular=False).encode
