"""A long batch, scored slice by slice where its scorers wait for others, so that calls that ask the same scorer get
their turns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from tandem.protos.contracts import Score, ScoreItem
from tandem.reward.scheduling.cancellation import CANCELLED, CancellationToken
from tandem.reward.scoring import CompiledRubric, Priority, ScoringCore

_FIRST_SLICE_ITEMS = 64
_SLICE_SECONDS = (
    1.0  # a slice is twice as long as the one before while that took less: the wait at its end must not count
)


def score_in_slices(
    core: ScoringCore,
    rubric: CompiledRubric,
    items: Sequence[ScoreItem],
    priority: Priority,
    cancellation: CancellationToken,
) -> list[Score]:
    """One result an item, in order. Items of a group are never parted.

    What runs in worker processes is not cut: calls take turns there, and a slice with an item that hangs would hold up
    the next.
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
