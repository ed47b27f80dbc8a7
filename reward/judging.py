"""Runs one scorer on the items of one call: in this thread or remotely.

When a call is cancelled, items without a score become `CANCELLED`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import cast

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.contracts import RemoteJudge, Scorer
from tandem.reward.registry import ScorerSpec
from tandem.reward.scheduling.cancellation import CANCELLED, CLOSING, CancellationToken
from tandem.reward.scheduling.interpreter_scheduler import InterpreterScheduler
from tandem.reward.scheduling.priority_queue import PRIORITIES, Priority

_THREADS = 32  # per priority; callers wait for a rubric's first remote scorer, these threads for the others


def judge_each(
    judge: Callable[[ScoreItem], Score],
    items: Sequence[ScoreItem],
    priority: Priority,
    cancellation: CancellationToken | None,
    scheduler: InterpreterScheduler | None,
) -> list[Score]:
    """Judges in this thread, in time slices by priority. Without a scheduler, judges at once."""
    one = judge if cancellation is None else lambda item: CANCELLED if cancellation.cancelled else judge(item)
    return [one(item) for item in items] if scheduler is None else scheduler.run_each(priority, one, items)


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


class RemoteJudges:
    """The remote judges of a service. Thread-safe except for `add`, which is called before the first judge is asked."""

    def __init__(self) -> None:
        self._judges: dict[str, Scorer] = {}
        self._names: dict[str, str] = {}
        # One pool per priority, so that jobs cannot use up the threads of the ring.
        self._threads = {priority: ThreadPoolExecutor(_THREADS, f"remote-scorer-{priority}") for priority in PRIORITIES}
        self._closing = False

    def __contains__(self, spec: ScorerSpec) -> bool:
        return spec.key in self._judges

    def add(self, spec: ScorerSpec, name: str, start: bool) -> None:
        """Builds a judge and starts it, or raises ScorerError. `name` is for figures; a number is appended if taken."""
        taken = set(self._names.values())
        names = [name, *(f"{name}-{number}" for number in range(2, len(taken) + 2))]
        self._names[spec.key] = next(one for one in names if one not in taken)
        judge = self._judges[spec.key] = cast(Scorer, spec.build())
        if start:
            judge.start()

    def begin(
        self, spec: ScorerSpec, items: Sequence[ScoreItem], priority: Priority, token: CancellationToken, aside: bool
    ) -> Callable[[], list[Score]]:
        """Returns a function that waits for the scores. With `aside`, another thread asks the judge at once."""
        judge = cast(RemoteJudge, self._judges[spec.key])
        judge_all = partial(judge_remotely, judge, items, priority, token, spec.grouped)
        if aside and not self._closing:
            return partial(wait_aside, self._threads[priority].submit(judge_all), token, len(items))
        return judge_all

    def figures(self) -> dict[str, float]:
        """Figures of every judge (spend, requests, waiting), as `figure:name`."""
        return {
            f"{figure}:{self._names[key]}": number
            for key, judge in list(self._judges.items())
            for figure, number in judge.figures().items()
        }

    def close(self) -> None:
        """Closes the judges; running items become unscored (`infrastructure`)."""
        self._closing = True
        for judge in list(self._judges.values()):
            judge.close()
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)
