"""Repetition: what share of an answer's n-grams were there before."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Annotated, Literal

from pydantic import Field

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer


class Repetition(Scorer):
    """-`penalty` · (1 - different n-grams / n-grams): 0 without a repetition, near -`penalty` for a loop. Never above
    0.

    The penalty on repeated n-grams of arXiv:2502.03373 (algorithm 1, which charges single tokens), summed up over the
    answer as in Open-R1's reward. Words are compared without their capitals. An answer shorter than n repeats nothing.
    The ground truth is not looked at.

    Example:
        >>> Repetition(n=2).judge(ScoreItem("", "wait wait wait wait wait", None))
        Scored(value=-0.75, breakdown={})
    """

    VERSION = "1"
    ISOLATION = "in_process"

    n: Annotated[int, Field(ge=1, le=1000)] = 3
    """Length of the runs that are compared, in units."""
    penalty: Annotated[float, Field(ge=0.0)] = 1.0
    """The penalty that an endless loop comes near to."""
    unit: Literal["words", "characters"] = "words"
    """`words`: what stands between white space. `characters`, for languages that write without spaces: all but white
    space.
    """

    def judge(self, item: ScoreItem) -> Score:
        words = item.solution.lower().split()
        runs = _runs(words if self.unit == "words" else "".join(words), self.n)
        if not runs:
            return Scored(0.0)
        return Scored(-self.penalty * (1.0 - len(set(runs)) / len(runs)) or 0.0)


def _runs(units: Iterable[Hashable], n: int) -> list[int]:
    """One number for every run of n units, the same number for the same run.

    Runs are put together from two shorter ones, log2(n) times, so that a large n costs neither the time nor the memory
    of a tuple of n units at every place.
    """
    numbers = _numbered(units)
    length = 1
    while length < n:
        step = min(length, n - length)  # the second part may overlap the first: together they still tell the run
        numbers = _numbered(zip(numbers, numbers[step:], strict=False))
        length += step
    return numbers


def _numbered(things: Iterable[Hashable]) -> list[int]:
    table: dict[Hashable, int] = {}
    return [table.setdefault(thing, len(table)) for thing in things]
