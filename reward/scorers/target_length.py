"""Target length: a reward for answers of a requested length."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.contracts import Scorer
from tandem.reward.text.values import Unit, measured, told_count


class TargetLength(Scorer):
    """How close the answer's length is to the requested one: the length terms of L1 (arXiv:2503.04697, LCPO).

    `exact`: -`slope` · |target - length|, to be added to a reward. `at_most`: `slope` · (target - length) + `offset`,
    limited to [0, 1]. The paper multiplies it by correctness: in a rubric, a gate of weight 0 before this scorer.

    Example:
        >>> TargetLength(target=1000).judge(ScoreItem("", "…", None, {"num_tokens": 1500}))
        Scored(value=-0.15, breakdown={'length': 1500.0})
    """

    ISOLATION = "in_process"

    target: Annotated[int, Field(ge=0)] = 0
    """The requested length; 0: each item gives it in `extra_info.target_length`."""
    mode: Literal["exact", "at_most"] = "exact"
    """`exact`: shorter is as bad as longer; `at_most`: shorter is better."""
    slope: Annotated[float, Field(gt=0.0)] = 0.0003
    """Cost of one token or character."""
    offset: Annotated[float, Field(ge=0.0, le=1.0)] = 0.5
    """With `at_most`: the score of an answer of exactly the requested length."""
    unit: Unit = "tokens"
    """Unit of length: tokens, as given by `extra_info.num_tokens`, or characters."""

    def judge(self, item: ScoreItem) -> Score:
        length = measured(item, self.unit)
        target = self.target or told_count(item, "target_length")
        if isinstance(length, Unscored):
            return length
        if isinstance(target, Unscored):
            return target
        if self.mode == "exact":
            value = -self.slope * abs(target - length) or 0.0
        else:
            value = min(1.0, max(0.0, self.slope * (target - length) + self.offset))
        return Scored(value, {"length": float(length)})
