"""Group rank: the share of its group that an answer beats by another scorer's values."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import partial
from typing import Any, cast

from pydantic import Field, PrivateAttr

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.answer_faults import AnswerFaults
from tandem.reward.contracts import Judge, RemoteJudge, Scorer
from tandem.reward.registry import SCORERS, make_scorer
from tandem.reward.scheduling.priority_queue import Priority
from tandem.reward.scorers.pairwise import split_groups


class GroupRank(Scorer):
    """The share of its group that an answer beats by another scorer's values: from 0 (none) to 1 (all); a tie counts
    half.

    Use it for a reward model whose scale drifts or has no meaning. The other scorer's own value is in the breakdown as
    `value`. Answers that it leaves unscored keep their reason, and the others are ranked without them; an answer that
    is itself at fault for that, e.g. too long for the model, shares the last place.

    Example:
        >>> ranks = GroupRank(scorer="numeric", arguments={"tolerance": 0.5})
        >>> items = [ScoreItem("", text, 4, group="7") for text in ("4", "9", "4.2")]
        >>> [score.value for score in ranks.judge_batch(items)]
        [0.75, 0.0, 0.75]
        >>> ranks.close()
    """

    VERSION = "2"
    ISOLATION = "remote"
    GROUPED = True

    scorer: str
    """The scorer whose values are compared. It must not need a worker process: `reward_model`, `judge`, `numeric`, …"""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Arguments of that scorer."""
    _judge: Scorer = PrivateAttr()
    _faults: AnswerFaults = PrivateAttr(default_factory=AnswerFaults)

    def model_post_init(self, context: object, /) -> None:
        kind = SCORERS.get(self.scorer)
        if kind is None:
            raise ValueError(f"scorer {self.scorer!r} is unknown")
        if kind.ISOLATION not in ("in_process", "remote") or kind.GROUPED:
            why = "compares groups itself" if kind.GROUPED else "needs a worker process"
            raise ValueError(f"scorer {self.scorer!r} {why}; a rank takes one that does not")
        self._judge = make_scorer(self.scorer, self.arguments)

    def judge_batch(self, items: Sequence[ScoreItem], *, priority: Priority = "calls") -> list[Score]:
        """One result an item, in order. Thread-safe; blocks its caller."""
        scores: list[Score] = [Unscored("invalid_input", "not compared")] * len(items)
        groups = split_groups(items, scores)
        values = iter(self._values([items[number] for numbers in groups for number in numbers], priority))
        for numbers in groups:
            answers = [items[number] for number in numbers]
            ask = partial(self._values, priority=priority)
            decided = self._faults.decide(self.scorer, answers, [next(values) for _ in numbers], ask)
            for number, score in zip(numbers, ranked(decided), strict=True):
                scores[number] = score
        return scores

    def close(self) -> None:
        self._judge.close()

    def figures(self) -> dict[str, float]:
        return self._judge.figures()

    def _values(self, items: Sequence[ScoreItem], priority: Priority) -> list[Score]:
        judge = self._judge
        if judge.ISOLATION == "remote":
            return cast(RemoteJudge, judge).judge_batch(items, priority=priority)
        return [cast(Judge, judge).judge(item) for item in items]


def ranked(values: Sequence[Score]) -> list[Score]:
    """For the scores of one group, the share of the other scored answers that each one beats."""
    numbers = sorted(score.value for score in values if isinstance(score, Scored))
    failure = next((score for score in values if isinstance(score, Unscored)), None)
    if len(numbers) == 1 and failure is not None:
        alone = Unscored(failure.reason, f"no other answer of the group has a score: {failure.detail}")
        return [alone if isinstance(score, Scored) else score for score in values]

    def rank(score: Scored) -> Scored:
        beaten = (bisect_left(numbers, score.value) + bisect_right(numbers, score.value) - 1) / 2
        return Scored(beaten / (len(numbers) - 1), {**score.breakdown, "value": score.value})

    return [rank(score) if isinstance(score, Scored) else score for score in values]
