"""The contract of a scorer, which `tandem.reward.registry` builds.

A scorer is a class in a file of its own in `reward/scorers/`. It derives from `Scorer`, has either `judge` or
`judge_batch`, and is known by the file's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from tandem.protos.contracts import Score, ScoreItem
from tandem.reward.scheduling.priority_queue import Priority

Isolation = Literal["in_process", "worker", "sandbox", "remote"]
"""Where a scorer runs, and what it must keep to in return.

`in_process`: in the caller's thread, for some milliseconds at a time. It takes time linear in the answer's length and
can neither hang nor crash.
`worker`: in a worker process with limits. It may hang or crash, which costs its own item and no other.
`sandbox`: as `worker`, and it starts sandboxes for untrusted code. It is killed with all it started.
`remote`: in the service's threads, because it waits for the network or for a process of its own. It has `judge_batch`
with a `priority` (`RemoteJudge`), may be called by several threads at once, raises nothing, and keeps its own time
limits.
"""


class Scorer(BaseModel):
    """Base class of all scorers. The fields of a subclass, each with a docstring below it, are the scorer's parameters.

    Validators raise ValueError for parameters that make no sense. They run in the service as well as in the workers, so
    they import nothing heavy and start nothing.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    VERSION: ClassVar[str] = "1"
    """Raised whenever a score could change."""
    ISOLATION: ClassVar[Isolation]
    """Where the scorer runs."""
    GROUPED: ClassVar[bool] = False
    """Items of one call with the same `group` are always judged together, in one `judge_batch`."""
    PRELOAD: ClassVar[tuple[str, ...]] = ()
    """Modules that the judge imports and that take long; a worker imports them before the first item's clock starts."""
    RECIPE_ONLY: ClassVar[tuple[str, ...]] = ()
    """Parameters that a client's rubric may not set: a file, a folder, an address, a waiver. A client may set none of a
    `remote` scorer: the recipe declares it under a name in `reward.scorers`.
    """

    @property
    def longest_seconds(self) -> float:
        """Time within which the judge ends every item itself; a worker is given no less for one. 0: it does not."""
        return 0.0

    def start(self) -> None:
        """Called once where the judge is used (not where a recipe is only checked). Raises ScorerError."""

    def close(self) -> None:
        """Ends connections and processes; calls in progress come back unscored (`infrastructure`)."""

    def figures(self) -> dict[str, float]:
        """Counters and gauges of a `remote` scorer, by name."""
        return {}


@runtime_checkable
class Judge(Protocol):
    """Judges one answer."""

    def judge(self, item: ScoreItem) -> Score:
        """The score, or why there is none, never a number in its place: an unusable ground truth is `invalid_input`."""
        ...


@runtime_checkable
class BatchJudge(Protocol):
    """Judges answers together: because it compares them, or because that is faster."""

    def judge_batch(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One result an item, in order."""
        ...


class RemoteJudge(BatchJudge, Protocol):
    """Waits for a scarce resource, which items of a higher priority get first (`scheduling/priority_queue.py`)."""

    def judge_batch(self, items: Sequence[ScoreItem], *, priority: Priority = "calls") -> list[Score]:
        """One result an item, in order."""
        ...


AnyJudge = Judge | BatchJudge
