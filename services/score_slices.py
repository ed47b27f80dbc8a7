"""A long batch, scored slice by slice, so that it ends soon after nobody wants it any more."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from protos.contracts import Score, ScoreItem
from reward.scoring import CompiledRubric, Lane, ScoringCore

_FIRST_SLICE_ITEMS = 64
_SLICE_SECONDS = (
    1.0  # a slice is twice as long as the one before while that took less: the wait at its end must not count
)


def score_in_slices(
    core: ScoringCore, rubric: CompiledRubric, items: Sequence[ScoreItem], lane: Lane, unwanted: threading.Event
) -> list[Score]:
    """One result an item, in order; fewer once `unwanted` is set. Items of a group are never parted."""
    if rubric.grouped and any(item.group for item in items):
        return [] if unwanted.is_set() else core.score(rubric, items, lane)
    scores: list[Score] = []
    length = _FIRST_SLICE_ITEMS
    while len(scores) < len(items) and not unwanted.is_set():
        started = time.monotonic()
        scores += core.score(rubric, items[len(scores) : len(scores) + length], lane)
        if time.monotonic() - started < _SLICE_SECONDS:
            length *= 2
    return scores
