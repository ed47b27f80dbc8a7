"""Repetition: the share of an answer's n-grams that occurred before."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import Annotated, Literal

from pydantic import Field

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer


class Repetition(Scorer):
    """-`penalty` · (1 - distinct n-grams / n-grams): 0 without repetition, close to -`penalty` for a loop.

    The penalty on repeated n-grams of arXiv:2502.03373 (algorithm 1, which penalises single tokens), computed over the
    whole answer as in Open-R1's reward. Case is ignored. An answer shorter than n scores 0.

    Example:
        >>> Repetition(n=2).judge(ScoreItem("", "wait wait wait wait wait", None))
        Scored(value=-0.75, breakdown={})
    """

    ISOLATION = "in_process"

    n: Annotated[int, Field(ge=1, le=1000)] = 3
    """Length of the n-grams, in units."""
    penalty: Annotated[float, Field(ge=0.0)] = 1.0
    """The penalty that an endless loop approaches."""
    unit: Literal["words", "characters"] = "words"
    """`words`: separated by white space. `characters`: all but white space, for languages written without spaces."""

    def judge(self, item: ScoreItem) -> Score:
        words = item.solution.lower().split()
        runs = _runs(words if self.unit == "words" else "".join(words), self.n)
        if not runs:
            return Scored(0.0)
        return Scored(-self.penalty * (1.0 - len(set(runs)) / len(runs)) or 0.0)


def _runs(units: Iterable[Hashable], n: int) -> list[int]:
    """One number for every n-gram, equal for equal ones, built in log2(n) steps from two shorter n-grams each."""
    numbers = _numbered(units)
    length = 1
    while length < n:
        step = min(length, n - length)  # the parts may overlap: together they still identify the n-gram
        numbers = _numbered(zip(numbers, numbers[step:], strict=False))
        length += step
    return numbers


def _numbered(things: Iterable[Hashable]) -> list[int]:
    table: dict[Hashable, int] = {}
    return [table.setdefault(thing, len(table)) for thing in things]
