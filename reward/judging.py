"""Runs one scorer on the items of one call: in this thread, in worker processes, or remotely.

When a call is cancelled, items without a score become `CANCELLED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.contracts import BatchJudge, RemoteJudge
from tandem.reward.endpoints.session_portal import CLOSING
from tandem.reward.scheduling.cancellation import CANCELLED, CancellationToken
from tandem.reward.scheduling.interpreter_scheduler import InterpreterScheduler
from tandem.reward.scheduling.priority_queue import Priority
from tandem.reward.workers.pool import ScorerPool
from tandem.reward.workers.requests import Request


def judge_each(
    judge: Callable[[ScoreItem], Score],
    items: Sequence[ScoreItem],
    priority: Priority,
    cancellation: CancellationToken | None,
    scheduler: InterpreterScheduler | None,
) -> list[Score]:
    """Judges in this thread, in time slices by priority. Without a scheduler, judges at once."""

    def judge_wanted(item: ScoreItem) -> Score:
        return CANCELLED if cancellation is not None and cancellation.cancelled else judge(item)

    one = judge if cancellation is None else judge_wanted
    return [one(item) for item in items] if scheduler is None else scheduler.run_each(priority, one, items)


def judge_together(
    judge: BatchJudge, items: Sequence[ScoreItem], priority: Priority, scheduler: InterpreterScheduler | None
) -> list[Score]:
    """Judges all items in one time slice, for a judge that compares them."""
    return (
        judge.judge_batch(items) if scheduler is None else scheduler.run_each(priority, judge.judge_batch, [items])[0]
    )


def wait_in_pool(pool: ScorerPool, request: Request, cancellation: CancellationToken) -> list[Score]:
    """Waits for the scores of a request that was submitted to the worker processes."""
    with cancellation.on_cancel(partial(pool.withdraw, request)):
        return request.wait()


def judge_remotely(
    judge: RemoteJudge, items: Sequence[ScoreItem], priority: Priority, cancellation: CancellationToken, grouped: bool
) -> list[Score]:
    """Asks a remote judge and blocks. `grouped`: the judge compares the items of a group."""
    if cancellation.cancelled:
        return [CANCELLED] * len(items)
    with cancellation.as_current():
        scores = judge.judge_batch(items, priority=priority)
    assert len(scores) == len(items), f"a scorer gave {len(scores)} results for {len(items)} items"
    return [_finite(score) for score in (_cut(scores, items, grouped) if cancellation.cancelled else scores)]


def wait_aside(judging: Future[list[Score]], cancellation: CancellationToken, number: int) -> list[Score]:
    """Waits for a `judge_remotely` of `number` items that runs in another thread."""
    try:
        with cancellation.on_cancel(judging.cancel):  # only if no thread has begun it; otherwise it ends by itself
            return judging.result()
    except CancelledError:
        return [CANCELLED if cancellation.cancelled else CLOSING] * number


def _cut(scores: Sequence[Score], items: Sequence[ScoreItem], grouped: bool) -> list[Score]:
    """Cancels the items that the judge gave up, and the rest of their groups if `grouped`: ranks need all answers."""
    closed = [isinstance(score, Unscored) and score.reason == CLOSING.reason for score in scores]
    groups = {item.group for item, gone in zip(items, closed, strict=True) if gone} if grouped else set()
    return [
        CANCELLED if score == CLOSING or item.group in groups else score
        for item, score in zip(items, scores, strict=True)
    ]


def _finite(score: Score) -> Score:
    if isinstance(score, Scored) and not math.isfinite(score.value):
        return Unscored("infrastructure", f"the scorer answered {score.value}, not a finite number")
    return score
