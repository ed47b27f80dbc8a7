"""Length of an answer: a penalty near the longest one allowed, and a reward for a length that was asked for."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from protos.contracts import Score, Scored, ScoreItem, Unscored
from reward.contracts import Isolation
from reward.ground_truth import shown

TOKENS = "num_tokens"
"""Key of `extra_info` that holds how many tokens the answer has: a scorer has no tokenizer."""

Unit = Literal["tokens", "characters"]


def measured(item: ScoreItem, unit: Unit) -> int | Unscored:
    """The length of an answer in characters (Unicode code points), or in the tokens that `extra_info.num_tokens` tells."""
    if unit == "characters":
        return len(item.solution)
    return _count(item, TOKENS)


def _count(item: ScoreItem, key: str) -> int | Unscored:
    count: Any = item.extra_info.get(key)
    if isinstance(count, int) and not isinstance(count, bool) and count >= 0:
        return count
    told = "is missing" if count is None else f"is {shown(count)}, not a number of tokens or characters"
    return Unscored("invalid_input", f"extra_info.{key} {told}")


@dataclass(frozen=True, slots=True)
class Overlong:
    """0, and below it for answers that come near the longest one allowed: DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

    0 up to `max_length` - `buffer`, from there linearly down to -`factor` at `max_length`, and -`factor` beyond. The same as the
    trainer's `selection.overlong_penalty`, for those who have no trainer: use one of them.

    Example:
        >>> Overlong(max_length=100, buffer=20).judge(ScoreItem("", "…", None, {"num_tokens": 95}))
        Scored(value=-0.75, breakdown={'length': 95.0})
    """

    VERSION: ClassVar[str] = "1"
    ISOLATION: ClassVar[Isolation] = "in_process"

    max_length: int
    """The longest answer that goes with less than the whole penalty."""
    buffer: int
    """Over how much length before `max_length` the penalty rises."""
    factor: float = 1.0
    """The penalty at `max_length`."""
    unit: Unit = "tokens"
    """What length is counted in: tokens, as told by `extra_info.num_tokens`, or characters."""
    beyond: Literal["flat", "ramp"] = "flat"
    """Past `max_length` the penalty stays at `factor` as in the paper, or goes on rising as in verl."""

    def __post_init__(self) -> None:
        if not 1 <= self.buffer <= self.max_length:
            raise ValueError("buffer must be at least 1 and at most max_length")
        if not (math.isfinite(self.factor) and self.factor >= 0):
            raise ValueError("factor must be finite and at least 0")

    def judge(self, item: ScoreItem) -> Score:
        length = measured(item, self.unit)
        if isinstance(length, Unscored):
            return length
        excess = max(0, length - (self.max_length - self.buffer))
        if self.beyond == "flat":
            excess = min(excess, self.buffer)
        return Scored(-self.factor * excess / self.buffer if excess else 0.0, {"length": float(length)})


@dataclass(frozen=True, slots=True)
class TargetLength:
    """How near the answer's length is to the one asked for: the length terms of L1 (arXiv:2503.04697, LCPO).

    `exact`: -`slope` · |target - length|, at most 0, to be added to a reward. `at_most`: `slope` · (target - length) + `offset`
    within [0, 1], which the paper multiplies by correctness: in a rubric, a gate of weight 0 on correctness before it does that.

    Example:
        >>> TargetLength(target=1000).judge(ScoreItem("", "…", None, {"num_tokens": 1500}))
        Scored(value=-0.15, breakdown={'length': 1500.0})
    """

    VERSION: ClassVar[str] = "1"
    ISOLATION: ClassVar[Isolation] = "in_process"

    target: int = 0
    """The length asked for; 0: every item tells it in `extra_info.target_length`."""
    mode: Literal["exact", "at_most"] = "exact"
    """Whether shorter is as bad as longer, or better."""
    slope: float = 0.0003
    """What one token or character costs."""
    offset: float = 0.5
    """With `at_most`: the score of an answer of just the target's length."""
    unit: Unit = "tokens"
    """What length is counted in: tokens, as told by `extra_info.num_tokens`, or characters."""

    def __post_init__(self) -> None:
        if self.target < 0:
            raise ValueError("target must be at least 0")
        if not (math.isfinite(self.slope) and self.slope > 0 and 0 <= self.offset <= 1):
            raise ValueError("slope must be finite and above 0, offset between 0 and 1")

    def judge(self, item: ScoreItem) -> Score:
        length = measured(item, self.unit)
        target = self.target or _count(item, "target_length")
        if isinstance(length, Unscored):
            return length
        if isinstance(target, Unscored):
            return target
        try:
            if self.mode == "exact":
                value = -self.slope * abs(target - length) or 0.0
            else:
                value = min(1.0, max(0.0, self.slope * (target - length) + self.offset))
            return Scored(value, {"length": float(length)})
        except OverflowError:
            return Unscored("invalid_input", "extra_info tells a length beyond every number")
