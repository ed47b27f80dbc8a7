"""The state of a run's ledger in plain Python, and what happens to a group within the scripts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tandem.protos.errors import FencedError, LostWritesError, NotAdmittedError

STAGES = ("prompts", "generated")
LONGEST_STEP_MS, SILENT_MS, MOST_HOLDERS, CHUNK = 5000, 3000, 16, 128

Place = float | str


@dataclass
class Limiter:
    """scripts/limiter.lua in Python: monotonic counters and the set of outstanding groups, which must agree.

    `retired` counts every returned credit, by publication or by a drop. `restored` counts groups whose credit a
    rollback took back. Only these can raise `outstanding` above the budget.
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
        return (self.staleness_budget + 1) * self.groups_per_batch

    @property
    def free(self) -> int:
        return max(0, self.budget - len(self.outstanding))

    @property
    def wanted(self) -> int:
        return max(0, self.target_groups + self.dropped - self.admitted)

    def admit(self, offered: Sequence[str]) -> list[str]:
        taken = list(offered[: min(self.free, self.wanted)])
        self.outstanding.update(taken)
        self.admitted += len(taken)
        return taken

    def retire(self, group_ids: Iterable[str]) -> int:
        retiring = self.outstanding.intersection(group_ids)
        self.outstanding -= retiring
        self.retired += len(retiring)
        return len(retiring)

    def drop(self, group_ids: Iterable[str]) -> None:
        self.dropped += self.retire(group_ids)

    def restore(self, group_ids: Iterable[str]) -> None:
        restoring = set(group_ids) - self.outstanding
        self.outstanding |= restoring
        self.restored += len(restoring)


@dataclass
class Group:
    """A group in progress. `place` is its score in the queue of its state."""

    state: str = ""
    place: float = 0
    token: int = 0
    worker: str = ""
    payload: bytes | None = None
    headers: str | None = None
    partial: bytes | None = None
    failures: dict[str, int] = field(default_factory=dict)
    completed: dict[str, int] = field(default_factory=dict)


@dataclass
class SamplerEntry:
    """A row of the registry."""

    address: str
    state: str = "JOINING"
    version: int = -1
    incarnation: int = -1


class LedgerState:
    """What a run's keys in Redis mean. `now_us` is the clock of Redis' host, which no loss of writes sets back."""

    def __init__(self, limiter: Limiter, budgets: dict[str, int]) -> None:
        self.limiter = limiter
        self.budgets = budgets
        self.groups: dict[str, Group] = {}
        self.admitted: set[str] = set()
        self.committed: set[str] = set()
        self.dropped: dict[str, set[str]] = {}
        self.reentered: set[str] = set()
        self.suspected: set[str] = set()
        self.set_aside: set[str] = set()
        self.incarnation = self.trainer_sequence = self.cursor = self.committed_version = 0
        self.published_version = self.recorded_version = -1
        self.feed_done = ""
        self.consecutive_drops = self.stale_results_refused = self.leases_expired = 0
        self.front = self.back = self.sequence = self.token = 0
        self.answers: dict[str, Any] = {}
        self.scored_answer: tuple[str, list[str]] | None = None
        self.samplers: dict[str, SamplerEntry] = {}
        self.generations: dict[str, int] = {}
        self.starts: dict[str, int] = {}
        self.beats: dict[str, int] = {}
        self.orders: dict[str, set[str]] = {"paused": set(), "standby": set(), "left": set()}
        self.clock: tuple[int, int] | None = None
        self.now_us = self.now_ms = 0

    def queue(self, state: str) -> list[str]:
        """The groups of a state in the order of its queue."""
        ids = (group_id for group_id, group in self.groups.items() if group.state == state)
        return sorted(ids, key=lambda one: (self.groups[one].place, one))

    def figures(self) -> dict[str, int]:
        """The counters, by their names in Redis; those that are 0 are there only if they were counted."""
        reasons = {f"dropped:{reason}": len(ids) for reason, ids in self.dropped.items()}
        return {
            "admitted": len(self.admitted),
            "committed": len(self.committed),
            "retired": self.limiter.retired,
            "restored": self.limiter.restored,
            "dropped": sum(reasons.values()),
            "stale_results_refused": self.stale_results_refused,
            "leases_expired": self.leases_expired,
            **reasons,
        }

    def _fence(self, call: Sequence[str]) -> list[str]:
        incarnation, *arguments, acknowledged, number = call
        if int(incarnation) != self.incarnation:
            raise FencedError("is not the current one")
        if self.trainer_sequence < int(acknowledged):
            raise LostWritesError("has lost writes")
        self.trainer_sequence = max(self.trainer_sequence, int(number))
        return arguments

    def _admit(self, group_id: str) -> None:
        self.limiter.outstanding.add(group_id)
        self.limiter.admitted += 1
        self.admitted.add(group_id)

    def _enter(self, group_id: str, state: str, place: Place) -> Group:
        group = self.groups.setdefault(group_id, Group())
        if place == "front":
            self.front -= 1
            place = self.front
        elif place == "back":
            self.back += 1
            place = self.back
        group.state, group.place = state, float(place)
        return group

    def _trained(self) -> dict[str, int]:
        """Group → the version in which it is trained."""
        return {one: int(group.place) for one, group in self.groups.items() if group.state == "trained"}

    def _drop(self, group_id: str, reason: str) -> None:
        del self.groups[group_id]
        self.dropped.setdefault(reason, set()).add(group_id)
        self.limiter.dropped += 1
        self.limiter.retire([group_id])
        if self.feed_done == "target" and self.limiter.wanted:
            self.feed_done = ""

    def _commit_group(self, group_id: str) -> None:
        del self.groups[group_id]
        self.committed.add(group_id)

    def _commit_first(self, last: int) -> int:
        """Commits the groups of the first trained version up to `last`; returns it, 0 if there is none."""
        trained = self._trained()
        version = min((one for one in trained.values() if one <= last), default=0)
        for group_id in [one for one in trained if trained[one] == version]:
            self.limiter.retire([group_id])
            self._commit_group(group_id)
        return version

    def _restore(self, group_id: str, version: int) -> None:
        ended = [ids for ids in (self.committed, *self.dropped.values()) if group_id in ids]
        if group_id not in self.groups and not ended:
            self._admit(group_id)
            self.reentered.add(group_id)
        for ids in ended:
            ids.remove(group_id)
            self.limiter.dropped -= ids is not self.committed
        self.suspected.discard(group_id)
        self.set_aside.discard(group_id)
        self.limiter.restore([group_id])
        group = self._enter(group_id, "trained", version)
        group.token, group.worker, group.payload, group.partial, group.headers = 0, "", None, None, None

    def _requeue(self, group_id: str, stage: str, place: str) -> None:
        group = self._enter(group_id, f"{stage}_waiting", place)
        group.token, group.worker = 0, ""

    def _fail(self, group_id: str, stage: str, kind: str, reason: str, place: str) -> str:
        failures = self.groups[group_id].failures
        failures[kind] = failures.get(kind, 0) + 1
        if failures[kind] > self.budgets.get(kind, MOST_HOLDERS):
            self._drop(group_id, reason)
            self.suspected |= {group_id} if kind != "infrastructure" else set()
            self.consecutive_drops += 1
            return "dropped"
        self._requeue(group_id, stage, place)
        return "requeued"

    def _lose_holder(self, group_id: str, stage: str) -> None:
        place = "front" if self.groups[group_id].failures.get("holder", 0) < 2 else "back"
        self._fail(group_id, stage, "holder", "holders_lost", place)

    def _sweep(self, stage: str) -> None:
        expired = [one for one in self.queue(f"{stage}_leased") if self.groups[one].place <= self.now_ms][:CHUNK]
        for group_id in sorted(expired, key=lambda one: -self.groups[one].token):
            self.leases_expired += 1
            if self.now_ms - self.beats.get(self.groups[group_id].worker, self.now_ms) > SILENT_MS:
                self._lose_holder(group_id, stage)
            else:
                self._fail(group_id, stage, "infrastructure", "lease_expired", "front")

    def _sweep_all(self) -> None:
        for stage in STAGES:
            self._sweep(stage)

    def _holds(self, group_id: str, stage: str, token: int) -> bool:
        group = self.groups.get(group_id, Group())
        return group.state == f"{stage}_leased" and group.place > self.now_ms and group.token == token

    def _make_live(self, name: str, version: int, incarnation: int) -> None:
        one = self.samplers[name]
        one.state, one.version, one.incarnation = "LIVE", version, incarnation

    def _outdate_samplers(self, current: tuple[int, int] | None = None) -> None:
        for one in self.samplers.values():
            if one.state == "LIVE" and (one.version, one.incarnation) != current:
                one.state = "STALE"

    def _check_replaced(self, name: str, generation: str) -> None:
        if generation and self.generations.get(name, 0) > int(generation):
            raise FencedError("was replaced by a later start of it")

    def _check_admitted(self, name: str, generation: str) -> None:
        if self.generations.get(name, 0) < int(generation or 0):
            raise LostWritesError("has lost the registration")
        self._check_replaced(name, generation)
        one = self.samplers.get(name)
        ordered = any(name in self.orders[order] for order in self.orders) or "*" in self.orders["paused"]
        if one is None or ordered or self.published_version < 0:
            raise NotAdmittedError("has not registered, is ordered not to, or there is no version")
        if one.state != "LIVE" or one.version != self.published_version:
            raise NotAdmittedError("has not the published version")
