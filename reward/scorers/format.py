"""Format: parts in a fixed order, each of which must match a regular expression."""

from __future__ import annotations

import re
from functools import cached_property
from typing import Self

from pydantic import Field, model_validator

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Scorer
from tandem.reward.scorers.tags import check_names, split_parts
from tandem.reward.text.values import Pattern


class Format(Scorer):
    r"""1 if the answer has every part, each part matches its pattern and the whole answer matches `pattern`, else 0; or
    the share of these checks that pass.

    Parts are as in the scorer `tags`: each occurs once and in order. White space around a part's content is ignored. A
    user's pattern may backtrack forever, so this scorer runs in a worker process.

    Example:
        >>> Format(parts={"answer": r"-?\d+"}).judge(ScoreItem("", "<think>2 + 2</think><answer>four</answer>", None))
        Scored(value=0.0, breakdown={'think': 1.0, 'answer': 0.0})
    """

    ISOLATION = "worker"

    order: tuple[str, ...] = ("think", "answer")
    """Names of the parts, in the required order."""
    parts: dict[str, Pattern] = Field(default_factory=dict)
    r"""Regular expressions that whole parts must match, e.g. `{answer = '-?\d+'}`; without one it must not be empty."""
    pattern: Pattern = ""
    """Regular expression that the whole answer must match; empty: anything. `.` matches line breaks in all of them."""
    only: bool = False
    """Allow only white space before, between and after the parts."""
    partial: bool = False
    """The score is the share of checks (parts, `pattern`, `only`) that pass, instead of all or nothing."""

    @model_validator(mode="after")
    def _patterns_fit_parts(self) -> Self:
        check_names(self.order)
        if not (self.order or self.pattern):
            raise ValueError("order or pattern must be given")
        for name in self.parts:
            if name not in self.order:
                raise ValueError(f"parts.{name}: order has no {name}, but {', '.join(self.order) or 'nothing'}")
        return self

    @cached_property
    def _compiled(self) -> dict[str, re.Pattern[str]]:
        patterns = {**dict.fromkeys(self.order, ".+"), **self.parts, "": self.pattern}
        return {name: re.compile(pattern, re.DOTALL) for name, pattern in patterns.items()}

    def judge(self, item: ScoreItem) -> Score:
        parts, outside = split_parts(item.solution, self.order)
        right = {
            name: float(part is not None and self._compiled[name].fullmatch(part) is not None)
            for name, part in parts.items()
        }
        if self.pattern:
            right["pattern"] = float(self._compiled[""].fullmatch(item.solution.strip()) is not None)
        if self.only:
            right["only"] = float(None not in parts.values() and not outside)
        share = sum(right.values()) / len(right)
        return Scored(share if self.partial else float(share == 1.0), right)
