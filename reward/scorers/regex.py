"""Regular expression: the text that a pattern finds in the answer must equal the ground truth."""

from __future__ import annotations

import re
from collections import deque
from functools import cached_property

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer
from tandem.reward.text.values import Pattern, accepted_texts, unusable


class RegexMatch(Scorer):
    r"""1 if the last match of `pattern` (its first group, if it has one) equals the ground truth, else 0.

    A user's pattern may backtrack forever while it holds the interpreter's lock: this scorer runs in a worker process.

    Example:
        >>> RegexMatch(pattern="#### (.+)").judge(ScoreItem("", "#### 41\n#### 42", "42"))
        Scored(value=1.0, breakdown={})
    """

    ISOLATION = "worker"

    pattern: Pattern
    """A regular expression of Python's `re`; `^` and `$` match at every line."""
    ignore_case: bool = False
    """Ignore upper and lower case."""
    compare: bool = True
    """False: any match scores 1, and the ground truth is not used."""

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.MULTILINE | (re.IGNORECASE if self.ignore_case else 0))

    def judge(self, item: ScoreItem) -> Score:
        last = next(iter(deque(self._compiled.finditer(item.solution), maxlen=1)), None)
        if not self.compare:
            return Scored(float(last is not None))
        accepted = accepted_texts(item.ground_truth)
        if accepted is None:
            return unusable(item.ground_truth)
        if last is None:
            return Scored(0.0)
        found = (last[1 if self._compiled.groups else 0] or "").strip()
        if self.ignore_case:
            found, accepted = found.casefold(), [text.casefold() for text in accepted]
        return Scored(float(found in accepted))
