"""What a scorer's class looks like to those who run it: `tandem.reward.registry` builds it, `tandem.reward.scoring` and
`tandem.reward.workers.worker` call it.

A scorer is a frozen dataclass whose fields are its parameters. It has `VERSION` (raised when a score could change),
`ISOLATION` (where it runs), and either `judge` or `judge_batch`. `__post_init__` raises ValueError for parameters that
make no sense; it runs in the service as well as in the workers, so it imports nothing heavy and starts nothing. What
else a class may say of itself:

`PRELOAD`      names of modules that its judge imports and that take their time; a worker has them before the first
item's clock starts
`GROUPED`      True: items of one call with the same `group` are always judged together, in one `judge_batch`
`RECIPE_ONLY`  names of parameters that a client's rubric may not set (a file, a folder, an address, a waiver); of a
`remote` scorer
               a client may set none: the recipe declares it under a name in `reward.scorers`

and what an object may say: `longest_seconds`, within which it ends every item itself (a worker is given no less for
one).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from tandem.protos.contracts import Score, ScoreItem
from tandem.reward.scheduling.priority_queue import Priority

Isolation = Literal["in_process", "worker", "sandbox", "remote"]
"""Where a scorer runs, and what it must hold in return.

`in_process`: in the caller's thread, some milliseconds at a time (`tandem.reward.scheduling.interpreter_scheduler`);
linear in the answer's length, it can neither hang nor crash.
`worker`: in a worker process with limits; it may hang or crash, which costs its item and no other.
`sandbox`: as `worker`, and it starts sandboxes for untrusted code itself; killed with all it started.
`remote`: on the service's threads, because it waits for the network or for a process of its own. It has `judge_batch`
with a `priority` (`RemoteJudge`) and `close`, may be called by several threads at once, raises nothing, and keeps its
own time limits.
"""


@runtime_checkable
class Judge(Protocol):
    """Judges one answer."""

    def judge(self, item: ScoreItem) -> Score:
        """Scored, or why not. Never a number in place of a reason: an unusable ground truth is unscored
        (`invalid_input`).
        """
        ...


@runtime_checkable
class BatchJudge(Protocol):
    """Judges answers together: because it compares them, or because that is faster."""

    def judge_batch(self, items: Sequence[ScoreItem]) -> list[Score]:
        """One result an item, in order."""
        ...


class RemoteJudge(BatchJudge, Protocol):
    """A judge with limited capacity: requests of a higher priority go first, and none starves
    (`tandem.reward.scheduling.priority_queue`).
    """

    def judge_batch(self, items: Sequence[ScoreItem], *, priority: Priority = "calls") -> list[Score]:
        """One result an item, in order."""
        ...


@runtime_checkable
class Startable(Protocol):
    """A judge that has something to start or to reach before it can judge."""

    def start(self) -> None:
        """Called once, before the first `judge_batch`, where the judge will be used (not where a recipe is only
        checked).

        Raises:
            ScorerError: it cannot be started.
        """
        ...


@runtime_checkable
class Closable(Protocol):
    """A judge that holds connections or processes."""

    def close(self) -> None:
        """Ends what it holds; calls under way come back unscored (`infrastructure`)."""
        ...


AnyJudge = Judge | BatchJudge
