"""Items and scores in tests of scorers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.contracts import Judge
from tandem.reward.registry import make_judge


def item(solution: str, ground_truth: Any = None, **extra_info: Any) -> ScoreItem:
    return ScoreItem("test", solution, ground_truth, extra_info)


def judge_of(scorer: str, arguments: dict[str, Any]) -> Judge:
    judge = make_judge(scorer, arguments)
    assert isinstance(judge, Judge)
    return judge


def value(score: Score) -> float:
    assert isinstance(score, Scored), score
    return score.value


def values(scores: Sequence[Score]) -> list[float]:
    return [value(score) for score in scores]


def refused(score: Score) -> tuple[str, str]:
    """Reason and detail of an item that is unscored."""
    assert isinstance(score, Unscored), score
    return score.reason, score.detail
