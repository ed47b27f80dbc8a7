"""How the calls of tools end, and how long they take: what the metrics show of a sampler's episodes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal, get_args

from tandem.protos.contracts import ToolOutcome

InvalidCall = Literal["unparsable_call", "unknown_tool", "bad_arguments"]
FailedCall = Literal["exception", "timeout", "crashed", "call_limit"]
ToolError = FailedCall | InvalidCall
TOOL_ERRORS: tuple[str, ...] = (*get_args(FailedCall), *get_args(InvalidCall))
RESULT = "result"
"""Outcome of a call that did not fail."""
OTHER = "other"
"""Stands for names that the recipe's tools do not have: the policy invents them, and the metrics keep each for ever."""
BOUNDS_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0)


@dataclass(slots=True)
class Durations:
    """A histogram of durations: `counts` has those up to each of `BOUNDS_SECONDS`, less the ones before; last, those
    above all of them.
    """

    total_seconds: float = 0.0
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_SECONDS) + 1))

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS_SECONDS, seconds)] += 1
        self.total_seconds += seconds

    def cumulative(self) -> Sequence[int]:
        """How many are up to each bound, and how many there are."""
        return list(accumulate(tuple(self.counts)))


class ToolFigures:
    """Sums since the sampler's start, by tool. Their keys never change, so any thread may read them."""

    def __init__(self, tools: Iterable[str]) -> None:
        names = dict.fromkeys((*tools, OTHER))
        self.call_seconds = {(name,): Durations() for name in names}
        """Of calls that were executed, also those that failed."""
        self.failures = {(name, outcome): 0 for name in names for outcome in (*TOOL_ERRORS, OTHER)}

    def tables(self) -> Mapping[str, object]:
        """By the names of the metrics' figures."""
        return {"call_seconds": self.call_seconds, "failures": self.failures}

    def add(self, outcomes: Iterable[ToolOutcome]) -> None:
        for one in outcomes:
            tool = one["tool"] if (one["tool"],) in self.call_seconds else OTHER
            if one["seconds"] is not None:
                self.call_seconds[tool,].add(one["seconds"])
            if one["outcome"] != RESULT:
                self.failures[tool, one["outcome"] if one["outcome"] in TOOL_ERRORS else OTHER] += 1
