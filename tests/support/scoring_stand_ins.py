"""Stand-ins for scorers in tests of the worker core, and a function that scores one item there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from pydantic import Field

from tandem.protos.contracts import Score, Scored, ScoreItem, Unscored
from tandem.protos.errors import ScorerError
from tandem.reward.contracts import Scorer
from tandem.reward.scheduling.priority_queue import Priority
from tandem.reward.scoring import CompiledRubric, ScoringCore

Make = Callable[..., ScoringCore]


def item(solution: str, truth: Any = "1", source: str = "d", group: str = "") -> ScoreItem:
    return ScoreItem(source, solution, truth, {}, group)


def score(core: ScoringCore, rubric: CompiledRubric, *items: ScoreItem) -> list[Score]:
    return core.score(rubric, items, "calls")


class Far(Scorer):
    """A stand-in for a remote scorer; what happens to it is written down."""

    VERSION = "1"
    ISOLATION = "remote"
    seen: ClassVar[list[str]] = []
    meeting: ClassVar[threading.Barrier | None] = None
    name: str = "far"
    value: float = 1.0
    at_start: list[str] = Field(default_factory=list)

    def start(self) -> None:
        self.seen.append(f"start {self.name}")
        if self.at_start:
            raise ScorerError(self.at_start[0])

    def judge_batch(self, items: Sequence[ScoreItem], *, priority: Priority = "calls") -> list[Score]:
        if self.meeting is not None:
            self.meeting.wait(timeout=30.0)
        self.seen.append(f"judge {self.name} {len(items)}")
        return [Unscored("limit", "spent") if one.solution == "costly" else Scored(self.value) for one in items]

    def close(self) -> None:
        self.seen.append(f"close {self.name}")

    def figures(self) -> dict[str, float]:
        return {f"spent_{self.name}": 0.5}


class Rank(Scorer):
    """A stand-in for a scorer that compares the items of a group: the share of its group that is shorter."""

    VERSION = "1"
    ISOLATION = "in_process"
    GROUPED = True

    def judge_batch(self, items: Sequence[ScoreItem]) -> list[Score]:
        groups = {one.group: [len(other.solution) for other in items if other.group == one.group] for one in items}
        return [Scored(float(sum(n < len(one.solution) for n in groups[one.group]))) for one in items]
