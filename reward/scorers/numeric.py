"""Numeric equality: a number in the answer equals the ground truth within a tolerance."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Annotated

from pydantic import Field

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer
from tandem.reward.text.values import finite, unusable

# A sign counts only if no operand precedes it ("5-3" ends in 3). No part backtracks over the same characters twice, so
# matching takes linear time on any answer and is safe in process.
_NUMBER = re.compile(
    r"(?P<sign>(?<![\w.)\]}])[-+\u2212])?[$\u20ac\u00a3]?"
    r"(?P<digits>(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?P<exponent>[eE][-+]?\d{1,4}(?!\w))?"
    r"(?: ?/ ?(?P<divisor>\d+(?:\.\d+)?))?"
)

_LAST_MATCHES = 16


class NumericEquality(Scorer):
    """1 if the last number of the answer equals the ground truth within `tolerance`, else 0; an answer without a number
    is wrong.

    Reads signs, thousands separators (`1,234`), decimals, exponents, currency signs and fractions (`3/4`).

    Example:
        >>> NumericEquality().judge(ScoreItem("", "that makes 1,234.0 eggs", "1234"))
        Scored(value=1.0, breakdown={})
    """

    ISOLATION = "in_process"

    tolerance: Annotated[float, Field(ge=0.0)] = 1e-6
    """Largest accepted difference, relative to the ground truth if that is above 1."""
    marker: str = ""
    """If set, e.g. `####`, only the first number after the last marker that has one is read."""

    def judge(self, item: ScoreItem) -> Score:
        truth = _number_of(item.ground_truth)
        if truth is None:
            return unusable(item.ground_truth, "not one number")
        answer = self._answered(item.solution)
        return Scored(float(answer is not None and abs(answer - truth) <= self.tolerance * max(1.0, abs(truth))))

    def _answered(self, solution: str) -> float | None:
        if not self.marker:
            return _last_in(solution)
        firsts = (next(_each_in(part), None) for part in reversed(solution.split(self.marker)[1:]))
        return next((number for number in firsts if number is not None), None)


def numbers_in(text: str) -> list[float]:
    """Every finite number written in a text, in order."""
    return list(_each_in(text))


def _each_in(text: str) -> Iterator[float]:
    return filter(math.isfinite, map(_value, _NUMBER.finditer(text)))


def _last_in(text: str) -> float | None:
    """The last finite number of a text. Only the last matches are converted, since converting is slow."""
    last = deque(_NUMBER.finditer(text), maxlen=_LAST_MATCHES)
    found = next(filter(math.isfinite, map(_value, reversed(last))), None)
    if found is None and len(last) == _LAST_MATCHES:  # the last matches all overflow a float
        found = next(reversed(numbers_in(text)), None)
    return found


def _value(match: re.Match[str]) -> float:
    digits = match["digits"].replace(",", "") + (match["exponent"] or "")
    divisor = float(match["divisor"] or "1")
    value = float(digits) / divisor if divisor else math.inf
    return -value if match["sign"] in ("-", "\u2212") else value


def _number_of(ground_truth: object) -> float | None:
    if isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool):
        return finite(ground_truth)
    if not isinstance(ground_truth, str):
        return None
    # A worked solution as ground truth (as in GSM8K's raw data) has many numbers; only a single one is unambiguous.
    found = list(islice(_each_in(ground_truth.rpartition("####")[2]), 2))
    return found[0] if len(found) == 1 else None
