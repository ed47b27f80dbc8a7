"""Exact match: the answer equals the ground truth, or one of them if it is a list."""

from __future__ import annotations

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer
from tandem.reward.text.values import accepted_texts, unusable

_RIGHT, _WRONG = Scored(1.0), Scored(0.0)


class ExactMatch(Scorer):
    """1 if the answer equals the ground truth, else 0. Leading and trailing white space is ignored.

    The ground truth is a text, a number, or a list of those, each of which is accepted.

    Example:
        >>> ExactMatch().judge(ScoreItem("", " 42", "42"))
        Scored(value=1.0, breakdown={})
    """

    ISOLATION = "in_process"

    ignore_case: bool = False
    """Ignore upper and lower case."""
    last_line: bool = False
    """Compare only the last non-blank line of the answer."""

    def judge(self, item: ScoreItem) -> Score:
        truth = item.ground_truth
        answer = item.solution.strip()
        if self.last_line:
            answer = answer.rpartition("\n")[2].strip()
        if type(truth) is str and not self.ignore_case:  # the common case, kept fast for benchmarks/reward_calls.py
            return _RIGHT if answer == truth.strip() else _WRONG
        accepted = accepted_texts(truth)
        if accepted is None:
            return unusable(truth)
        if self.ignore_case:
            answer, accepted = answer.casefold(), [text.casefold() for text in accepted]
        return _RIGHT if answer in accepted else _WRONG
