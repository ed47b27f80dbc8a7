"""Format: parts in their order, and a regular expression that each of them must match."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import ClassVar

from tandem.protos.contracts import Score, Scored, ScoreItem
from tandem.reward.contracts import Isolation
from tandem.reward.scorers.tags import check_names, outside, places_of


@dataclass(frozen=True, slots=True)
class Format:
    r"""1 if every part of the answer is there and matches its pattern, and the whole matches `pattern`, else 0; or the
    share that does.

    Parts are as in the scorer `tags`: each once, in their order, without the white space around its content. A user's
    pattern may backtrack for ever, so this scorer runs in a worker process; `tags` does without patterns.

    Example:
        >>> Format(parts={"answer": r"-?\d+"}).judge(ScoreItem("", "<think>2 + 2</think><answer>four</answer>", None))
        Scored(value=0.0, breakdown={'think': 1.0, 'answer': 0.0})
    """

    VERSION: ClassVar[str] = "1"
    ISOLATION: ClassVar[Isolation] = "worker"

    order: tuple[str, ...] = ("think", "answer")
    """Names of the parts in the order in which they must come."""
    parts: dict[str, str] = field(default_factory=dict)
    r"""Name of a part → what all of its content must match; `.` matches line breaks too: `{answer = '-?\d+'}`. A part
    without a pattern must not be empty.
    """
    pattern: str = ""
    """What the whole answer must match; "": anything."""
    only: bool = False
    """Nothing but white space may stand before, between and behind the parts."""
    partial: bool = False
    """The score is the share of the parts (and of `pattern`, and `only`) that are right, not all or nothing."""
    _compiled: dict[str, re.Pattern[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_names(self.order)
        if not (self.order or self.pattern):
            raise ValueError("order or pattern must be given")
        for name in self.parts:
            if name not in self.order:
                raise ValueError(f"parts.{name}: order has no {name}, but {', '.join(self.order) or 'nothing'}")
        compiled = {}
        for name, pattern in {**dict.fromkeys(self.order, ".+"), **self.parts, "": self.pattern}.items():
            try:
                compiled[name] = re.compile(pattern, re.DOTALL)
            except re.error as error:
                place = f"parts.{name}" if name else "pattern"
                raise ValueError(f"{place} {pattern!r} is not a regular expression: {error}") from None
        object.__setattr__(self, "_compiled", compiled)

    def judge(self, item: ScoreItem) -> Score:
        text, order = item.solution, self.order
        places = places_of(text, order)
        right = {
            name: float(place is not None and self._compiled[name].fullmatch(text[slice(*place)].strip()) is not None)
            for name, place in zip(order, places, strict=True)
        }
        if self.pattern:
            right["pattern"] = float(self._compiled[""].fullmatch(text.strip()) is not None)
        if self.only:
            right["only"] = float(None not in places and not outside(text, order, places).strip())
        share = sum(right.values()) / len(right)
        return Scored(share if self.partial else float(share == 1.0), right)
