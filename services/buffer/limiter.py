"""The staleness limiter in Python: a copy of scripts/limiter.lua, which documents its rules.

A group is outstanding from its admission until a version trained on it is published, or until it is dropped. A group is
admitted only while fewer than (S + 1)·P groups are outstanding. S = 0 is synchronous training, and S bounds the mean
age of trained groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Limiter:
    """Monotonic counters and the set of outstanding groups, which must agree with them.

    `retired` counts every returned credit, by publication or by a drop. `restored` counts groups whose credit a
    rollback took back. Only these can raise `outstanding` above the budget; then no group is admitted until it is below
    again.
    """

    groups_per_batch: int
    staleness_budget: int
    target_groups: int
    admitted: int = 0
    retired: int = 0
    restored: int = 0
    dropped: int = 0
    outstanding: set[str] = field(default_factory=set)

    @property
    def budget(self) -> int:
        """(S + 1)·P."""
        return (self.staleness_budget + 1) * self.groups_per_batch

    @property
    def free(self) -> int:
        """Credits left now."""
        return max(0, self.budget - len(self.outstanding))

    @property
    def wanted(self) -> int:
        """Groups that the run still needs: its target and a replacement of every dropped group."""
        return max(0, self.target_groups + self.dropped - self.admitted)

    def admit(self, offered: Sequence[str]) -> list[str]:
        """Admits the prefix that credits and target allow, and returns it."""
        taken = list(offered[: min(self.free, self.wanted)])
        self.outstanding.update(taken)
        self.admitted += len(taken)
        return taken

    def retire(self, group_ids: Iterable[str]) -> None:
        """Returns the credits of groups whose version is published. Groups without a credit are skipped."""
        retiring = self.outstanding.intersection(group_ids)
        self.outstanding -= retiring
        self.retired += len(retiring)

    def drop(self, group_ids: Iterable[str]) -> None:
        """Returns the credits of dropped groups and lets them be replaced."""
        dropping = self.outstanding.intersection(group_ids)
        self.retire(dropping)
        self.dropped += len(dropping)

    def restore(self, group_ids: Iterable[str]) -> None:
        """Takes credits back for groups that a rollback makes outstanding again, beyond the budget if necessary."""
        restoring = set(group_ids) - self.outstanding
        self.outstanding |= restoring
        self.restored += len(restoring)
