"""How a scorer judges the items of one call, wherever it runs, until it has or the cutoff ends: then what is not
settled is `CUT_OFF`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.contracts import BatchJudge, RemoteJudge
from tandem.reward.endpoints.loop_thread import CLOSING
from tandem.reward.scheduling.cancellation import CUT_OFF, CancellationToken
from tandem.reward.scheduling.interpreter_scheduler import InterpreterScheduler
from tandem.reward.scheduling.priority_queue import Priority
from tandem.reward.workers.pool import ScorerPool
from tandem.reward.workers.requests import Request


def judge_each(
    judge: Callable[[ScoreItem], Score],
    items: Sequence[ScoreItem],
    lane: Priority,
    cutoff: CancellationToken | None,
    turns: InterpreterScheduler | None,
) -> list[Score]:
    """In this thread, in the turns of its lane; here and now for None."""

    def judge_wanted(item: ScoreItem) -> Score:
        return CUT_OFF if cutoff is not None and cutoff.ended else judge(item)

    one = judge if cutoff is None else judge_wanted
    return [one(item) for item in items] if turns is None else turns.each(lane, one, items)


def judge_together(
    judge: BatchJudge, items: Sequence[ScoreItem], lane: Priority, turns: InterpreterScheduler | None
) -> list[Score]:
    """The same for a judge that compares the items: all in one turn."""
    return judge.judge_batch(items) if turns is None else turns.each(lane, judge.judge_batch, [items])[0]


def wait_in_pool(pool: ScorerPool, request: Request, cutoff: CancellationToken) -> list[Score]:
    """What worker processes make of a request that was submitted."""
    with cutoff.hooked(partial(pool.withdraw, request)):
        return request.wait()


def judge_remotely(
    judge: RemoteJudge, items: Sequence[ScoreItem], lane: Priority, cutoff: CancellationToken, grouped: bool
) -> list[Score]:
    """In this thread, which waits. `grouped`: the judge compares the items of a group."""
    if cutoff.ended:
        return [CUT_OFF] * len(items)
    with cutoff.in_force():
        scores = judge.judge_batch(items, lane=lane)
    assert len(scores) == len(items), f"a scorer gave {len(scores)} results for {len(items)} items"
    return [_finite(score) for score in (_cut(scores, items, grouped) if cutoff.ended else scores)]


def wait_aside(judging: Future[list[Score]], cutoff: CancellationToken, number: int) -> list[Score]:
    """The same in another thread, for so many items."""
    try:
        with cutoff.hooked(judging.cancel):  # for one that no thread has taken up; the others end by themselves
            return judging.result()
    except CancelledError:
        return [CUT_OFF if cutoff.ended else CLOSING] * number


def _cut(scores: Sequence[Score], items: Sequence[ScoreItem], grouped: bool) -> list[Score]:
    """Without what the judge ended early, and without whatever was compared with that: a rank among fewer is not the
    rank.
    """
    closed = [isinstance(score, Unscored) and score.reason == CLOSING.reason for score in scores]
    groups = {item.group for item, gone in zip(items, closed, strict=True) if gone} if grouped else set()
    return [
        CUT_OFF if score == CLOSING or item.group in groups else score
        for item, score in zip(items, scores, strict=True)
    ]


def _finite(score: Score) -> Score:
    if isinstance(score, Scored) and not math.isfinite(score.value):
        return Unscored("infrastructure", f"the scorer answered {score.value}, not a finite number")
    return score
