"""Scores for whoever waits for them: by any rubric, in time, and nothing more once nobody waits."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from tandem.protos import reward_pb2
from tandem.protos.contracts import Unscored
from tandem.protos.errors import ScorerError, UnavailableError
from tandem.reward.scheduling.cancellation import CancellationToken
from tandem.reward.scoring import CompiledRubric, ScoringCore
from tandem.services.reward.inline import is_quick
from tandem.services.reward.scorer_list import DEADLINE_MARGIN_SECONDS, MAX_RUBRIC_BYTES
from tandem.services.reward.slices import score_in_slices
from tandem.services.reward.waits import SHUTTING_DOWN, Waits
from tandem.services.reward.wire import check_size, read_items, reply_of, with_faults
from tandem.services.rpc.limits import MAX_CALLS

_MARGIN_SHARE = 0.1  # of a time that is short
_MOST_BYTES_IN_FLIGHT = 256 << 20
_RUBRICS_KEPT = 64
_SCORING_THREADS = MAX_CALLS  # nearly all of them wait for others: no call waits for a thread behind those that hang
_COMPILING_THREADS = 2

Result = TypeVar("Result")


class ScoreCalls:
    """Scores requests on an event loop, in threads. The core must be closed before it is, so that what hangs there
    comes back.
    """

    def __init__(self, core: ScoringCore, waits: Waits) -> None:
        self._core = core
        self._waits = waits
        self._scoring = ThreadPoolExecutor(_SCORING_THREADS, "score")
        self._compiling = ThreadPoolExecutor(_COMPILING_THREADS, "compile")
        self._rubrics: OrderedDict[str, CompiledRubric] = OrderedDict()
        self._bytes_in_flight = 0

    def close(self) -> None:
        """Starts no more threads' work."""
        self._scoring.shutdown(wait=False, cancel_futures=True)
        self._compiling.shutdown(wait=False, cancel_futures=True)

    async def score(self, request: reward_pb2.ScoreRequest, seconds: float) -> reward_pb2.ScoreReply:
        """One result an item, in order, within `seconds`: shortly before they are over items that have none are
        unscored (`timeout`).

        If the caller goes, they leave every queue at once.

        Raises:
            DataError, SizeError: the request is over a limit.
            ScorerError: its rubric cannot be used.
            UnavailableError: too much is being scored, or the service ends.
            DeadlineError: scorers of this process, which are not interrupted within an item, took longer.
        """
        num_bytes = request.ByteSize()
        check_size("the request", len(request.items), num_bytes)
        rubric = await self.rubric(request.rubric) if request.rubric else self._core.default
        if is_quick(rubric, len(request.items), num_bytes):
            return self._score(rubric, request, None)
        if self._bytes_in_flight + num_bytes > _MOST_BYTES_IN_FLIGHT:
            raise UnavailableError(f"{self._bytes_in_flight >> 20} MiB of requests are being scored; try again")
        cancellation = CancellationToken()
        margin = min(DEADLINE_MARGIN_SECONDS, _MARGIN_SHARE * seconds)
        answering = asyncio.get_running_loop().call_later(seconds - margin, cancellation.cancel)
        self._bytes_in_flight += num_bytes
        try:
            return await self._waits.in_thread(
                self._scoring, self._score, rubric, request, cancellation, seconds=seconds
            )
        finally:
            answering.cancel()
            cancellation.cancel()  # the caller may have gone
            self._bytes_in_flight -= num_bytes

    async def rubric(self, text: str) -> CompiledRubric:
        """Raises ScorerError for a text that is none."""
        known = self._rubrics.get(text)
        if known is not None:
            self._rubrics.move_to_end(text)
            return known
        if len(text.encode()) > MAX_RUBRIC_BYTES:
            raise ScorerError(f"the rubric has {len(text.encode()):,} bytes, at most {MAX_RUBRIC_BYTES:,} are allowed")
        compiled = await self.look_up(self._core.compile, text)
        self._rubrics[text] = compiled
        if len(self._rubrics) > _RUBRICS_KEPT:
            self._rubrics.popitem(last=False)
        return compiled

    async def look_up(self, call: Callable[..., Result], *arguments: Any) -> Result:
        """The result of a call that waits for nobody, in a thread of those that score nothing."""
        return await self._waits.in_thread(self._compiling, call, *arguments)

    def _score(
        self, rubric: CompiledRubric, request: reward_pb2.ScoreRequest, cancellation: CancellationToken | None
    ) -> reward_pb2.ScoreReply:
        items, faults = read_items(request.items)
        if cancellation is None:
            scores = self._core.score(rubric, items, "calls", at_once=True)
        else:
            scores = score_in_slices(self._core, rubric, items, "calls", cancellation)
        if self._core.closing and any(one.reason == "infrastructure" for one in scores if isinstance(one, Unscored)):
            raise UnavailableError(SHUTTING_DOWN)  # and not of the items' own accord
        return reply_of(with_faults(scores, faults) if faults else scores)
