"""Scores the requests of `Score` and `ScoreStream`, with any rubric, before their deadlines."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from tandem.protos import reward_pb2
from tandem.protos.contracts import Score, ScoreItem, Unscored
from tandem.protos.errors import ScorerError, UnavailableError
from tandem.reward.scheduling.cancellation import CANCELLED, CancellationToken
from tandem.reward.scheduling.priority_queue import Priority
from tandem.reward.scoring import CompiledRubric, ScoringCore
from tandem.services.reward.shutdown import SHUTTING_DOWN, Shutdown
from tandem.services.reward.wire import check_size, read_items, reply_of, with_faults
from tandem.services.rpc.limits import MAX_CALLS

MAX_RUBRIC_BYTES = 64 << 10
DEADLINE_MARGIN_SECONDS = 1.0
"""A call replies this long before its deadline, or a tenth of its time before it if that is less."""
MAX_INLINE_WORK = 128 << 10
"""Bytes that the fastest scorers may read on the event loop. That takes a few milliseconds at most; a thread would cost
more (part `calls` of benchmarks/reward.py).
"""
_FAST_SCORERS = frozenset({"exact", "math_boxed", "math_dapo", "overlong", "target_length"})
_SLOW_FACTOR = 16  # other scorers need this many times as long for a byte (measured: up to 1,000 ns against 6 ns)
_ITEM_BYTES = 256  # an item costs as much as these bytes before its first byte is read
_ARGUMENT_BYTES = 64  # arguments of this length cost as much as another scorer: `tags` looks for every name in them
_FIRST_SLICE_ITEMS = 64
_SLICE_SECONDS = 1.0  # slices double while they take less, so that the wait at the end of each does not matter

_MARGIN_SHARE = 0.1  # of the call's time, if this is less than DEADLINE_MARGIN_SECONDS
_MAX_BYTES_IN_FLIGHT = 256 << 20
_MAX_RUBRICS = 64
_SCORING_THREADS = MAX_CALLS  # one a call: calls that hang must not keep others from a thread
_COMPILING_THREADS = 2

Result = TypeVar("Result")


class RequestScorer:
    """Scores requests: small ones on the event loop, others in threads."""

    def __init__(self, core: ScoringCore, shutdown: Shutdown) -> None:
        self._core = core
        self._shutdown = shutdown
        self._scoring = ThreadPoolExecutor(_SCORING_THREADS, "score")
        self._compiling = ThreadPoolExecutor(_COMPILING_THREADS, "compile")
        self._rubrics: OrderedDict[str, CompiledRubric] = OrderedDict()
        self._bytes_in_flight = 0

    def close(self) -> None:
        """Starts no more work in threads. Close the core first, which ends calls that hang in it."""
        self._scoring.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)

    async def score(self, request: reward_pb2.ScoreRequest, seconds: float) -> reward_pb2.ScoreReply:
        """Returns one result for each item, in order, within `seconds`. Shortly before that time is over, items without
        a result become unscored (`timeout`). If the caller cancels, the items leave every queue at once. Raises
        DataError or SizeError if the request exceeds a limit, ScorerError if the rubric cannot be used,
        UnavailableError if too many bytes are being scored or the service stops, and DeadlineError if scorers in this
        process took longer: nothing interrupts them within an item.
        """
        num_bytes = request.ByteSize()
        check_size("the request", len(request.items), num_bytes)
        rubric = await self.rubric(request.rubric) if request.rubric else self._core.default
        if is_quick(rubric, len(request.items), num_bytes):
            return self._score(rubric, request, None)
        if self._bytes_in_flight + num_bytes > _MAX_BYTES_IN_FLIGHT:
            raise UnavailableError(f"{self._bytes_in_flight >> 20} MiB of requests are being scored; try again")
        cancellation = CancellationToken()
        margin = min(DEADLINE_MARGIN_SECONDS, _MARGIN_SHARE * seconds)
        answering = asyncio.get_running_loop().call_later(seconds - margin, cancellation.cancel)
        self._bytes_in_flight += num_bytes
        arguments = (rubric, request, cancellation)
        try:
            return await self._shutdown.run_in(self._scoring, self._score, *arguments, seconds=seconds)
        finally:
            answering.cancel()
            cancellation.cancel()  # the caller may have gone
            self._bytes_in_flight -= num_bytes

    async def rubric(self, text: str) -> CompiledRubric:
        """Compiles a rubric, or takes it from the cache. Raises ScorerError if it cannot be used."""
        known = self._rubrics.get(text)
        if known is not None:
            self._rubrics.move_to_end(text)
            return known
        if len(text.encode()) > MAX_RUBRIC_BYTES:
            raise ScorerError(f"the rubric has {len(text.encode()):,} bytes, at most {MAX_RUBRIC_BYTES:,} are allowed")
        compiled = await self.look_up(self._core.compile, text)
        self._rubrics[text] = compiled
        if len(self._rubrics) > _MAX_RUBRICS:
            self._rubrics.popitem(last=False)
        return compiled

    async def look_up(self, call: Callable[..., Result], *arguments: object) -> Result:
        """Runs a short call in a thread that scores nothing, so it need not wait for scorers."""
        return await self._shutdown.run_in(self._compiling, call, *arguments)

    def _score(
        self, rubric: CompiledRubric, request: reward_pb2.ScoreRequest, cancellation: CancellationToken | None
    ) -> reward_pb2.ScoreReply:
        items, faults = read_items(request.items)
        if cancellation is None:
            scores = self._core.score(rubric, items, "calls", at_once=True)
        else:
            scores = score_in_slices(self._core, rubric, items, "calls", cancellation)
        if self._core.closing and any(one.reason == "infrastructure" for one in scores if isinstance(one, Unscored)):
            raise UnavailableError(SHUTTING_DOWN)  # the shutdown made the scorers unreachable
        return reply_of(with_faults(scores, faults) if faults else scores)


def is_quick(rubric: CompiledRubric, num_items: int, num_bytes: int) -> bool:
    """Whether a request takes so little time that it may be scored on the event loop."""
    size = num_bytes + _ITEM_BYTES * num_items
    if not rubric.in_process or size > MAX_INLINE_WORK:
        return False
    weight = sum(
        (1 if spec.scorer in _FAST_SCORERS else _SLOW_FACTOR) * (1 + len(spec.arguments) // _ARGUMENT_BYTES)
        for spec in rubric.rubric.specs()
    )
    return size * weight <= MAX_INLINE_WORK


def score_in_slices(
    core: ScoringCore,
    rubric: CompiledRubric,
    items: Sequence[ScoreItem],
    priority: Priority,
    cancellation: CancellationToken,
) -> list[Score]:
    """Returns one result for each item, in order. Remote scorers get a long batch in slices, so that other calls take
    turns with it; a group is never split. Worker processes get it whole: calls take turns there anyway, and an item
    that hangs would delay the next slice.
    """
    remote = any(spec.isolation == "remote" for spec in rubric.rubric.specs())
    if not remote or (rubric.grouped and any(item.group for item in items)):
        return core.score(rubric, items, priority, cancellation)
    scores: list[Score] = []
    length = _FIRST_SLICE_ITEMS
    while len(scores) < len(items) and not cancellation.cancelled:
        started = time.monotonic()
        scores += core.score(rubric, items[len(scores) : len(scores) + length], priority, cancellation)
        if time.monotonic() - started < _SLICE_SECONDS:
            length *= 2
    return scores + [CANCELLED] * (len(items) - len(scores))
