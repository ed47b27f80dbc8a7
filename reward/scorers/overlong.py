"""Overlong penalty: a penalty for answers near the length limit."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.reward.contracts import Scorer
from tandem.reward.text.values import Unit, measured


class Overlong(Scorer):
    """A negative score near the length limit, else 0: DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13).

    0 up to `max_length` - `buffer`, then linearly down to -`factor` at `max_length`, and -`factor` beyond. The
    trainer's `selection.overlong_penalty` does the same; use only one of them.

    Example:
        >>> Overlong(max_length=100, buffer=20).judge(ScoreItem("", "…", None, {"num_tokens": 95}))
        Scored(value=-0.75, breakdown={'length': 95.0})
    """

    ISOLATION = "in_process"

    max_length: int
    """Length at which the whole penalty applies."""
    buffer: Annotated[int, Field(ge=1)]
    """Length before `max_length` over which the penalty grows."""
    factor: Annotated[float, Field(ge=0.0)] = 1.0
    """The penalty at `max_length`."""
    unit: Unit = "tokens"
    """Unit of length: tokens, as given by `extra_info.num_tokens`, or characters."""
    beyond: Literal["flat", "ramp"] = "flat"
    """Beyond `max_length` the penalty stays at `factor` as in the paper (`flat`), or grows as in verl (`ramp`)."""

    @model_validator(mode="after")
    def _buffer_fits(self) -> Self:
        if self.buffer > self.max_length:
            raise ValueError("buffer must be at most max_length")
        return self

    def judge(self, item: ScoreItem) -> Score:
        length = measured(item, self.unit)
        if isinstance(length, Unscored):
            return length
        excess = max(0, length - (self.max_length - self.buffer))
        if self.beyond == "flat":
            excess = min(excess, self.buffer)
        return Scored(-self.factor * excess / self.buffer if excess else 0.0, {"length": float(length)})
