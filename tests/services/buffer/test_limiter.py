"""The limiter: Lua and Python agree at every step, the budget holds, and the run never deadlocks."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from tandem.services.buffer.types import STATES
from tests.support import redis_ring as ring

_QUICK = settings(max_examples=30, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))


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


def limits_of(twin: Limiter) -> dict[str, int]:
    return {name: getattr(twin, name) for name in ("groups_per_batch", "staleness_budget", "target_groups")}


class RingMachine(RuleBasedStateMachine):
    """Drives a ring in Redis and its Python twin side by side, with drops at every stage, crashes and rollbacks."""

    url: str

    @initialize(
        groups_per_batch=st.integers(1, 4), staleness_budget=st.integers(0, 3), target_groups=st.integers(1, 40)
    )
    def start(self, groups_per_batch: int, staleness_budget: int, target_groups: int) -> None:
        self.twin = Limiter(groups_per_batch, staleness_budget, target_groups)
        self.buffer = ring.new_run(self.url, **limits_of(self.twin))
        self.incarnation = self.buffer.counts()["incarnation"]
        self.batches: dict[int, list[str]] = {}
        self.committed = self.published = self.recorded = 0
        self.ceiling = self.twin.budget

    @rule(count=st.integers(1, 12))
    def offer(self, count: int) -> None:
        cursor = self.buffer.admission().cursor
        offered = [f"0-{index}" for index in range(cursor, cursor + count)]
        assert ring.offer(self.buffer, count) == self.twin.admit(offered)

    @rule(n=st.integers(1, 6))
    def sample(self, n: int) -> None:
        if self.buffer.samplers()[0].state != "LIVE":
            assert self.buffer.admit_sampler(self.incarnation, ring.SAMPLER, self.published)
        ring.move(self.buffer, "prompts", n)

    @rule(n=st.integers(1, 6))
    def score(self, n: int) -> None:
        ring.move(self.buffer, "generated", n)

    @rule(n=st.integers(1, 3), kind=st.sampled_from(["infrastructure", "data", "voluntary"]))
    def fail_to_score(self, n: int, kind: str) -> None:
        for claim in ring.claim(self.buffer, "generated", n):
            if self.buffer.release(claim, "unscored", kind) == "dropped":  # type: ignore[arg-type]
                self.twin.drop([claim.group_id])

    @rule(n=st.integers(1, 6), drop_percent=st.integers(0, 99), seed=st.integers(0, 1000))
    def train(self, n: int, drop_percent: int, seed: int) -> None:
        chance = random.Random(seed)
        claimed = [claim.group_id for claim in self.buffer.claim_scored(self.incarnation, n, 0)]
        rejected = [group_id for group_id in claimed if chance.random() * 100 < drop_percent]
        survivors = [group_id for group_id in claimed if group_id not in rejected]
        self.buffer.drop_claimed(self.incarnation, rejected, "rejected")
        self.twin.drop(rejected)
        if survivors:
            self.recorded += 1
            self.buffer.record(self.incarnation, self.recorded, survivors)
            self.batches[self.recorded] = survivors

    @rule(count=st.integers(1, 12), n=st.integers(1, 6), drop_percent=st.integers(0, 50), seed=st.integers(0, 1000))
    def turn(self, count: int, n: int, drop_percent: int, seed: int) -> None:
        """Runs all stages in sequence, because single rules alone rarely occur in an order that trains a batch."""
        self.offer(count)
        self.sample(count)
        self.score(count)
        self.train(n, drop_percent, seed)

    @rule()
    def publish(self) -> None:
        self.buffer.publish(self.incarnation, self.recorded, [ring.SAMPLER])
        self.published = self.recorded
        for group_ids in self.batches.values():
            self.twin.retire(group_ids)

    @rule()
    def commit(self) -> None:
        self.buffer.commit(self.incarnation, self.published)
        self.committed = self.published

    @precondition(lambda self: self.recorded > self.committed)
    @rule(ahead=st.integers(0, 2))
    def crash(self, ahead: int) -> None:
        """The trainer dies; the disk holds a checkpoint at least as new as the last commit."""
        checkpoint = min(self.committed + ahead, self.recorded)
        later = {version: group_ids for version, group_ids in self.batches.items() if version > checkpoint}
        self.incarnation = self.buffer.begin_incarnation()
        self.buffer.rollback(self.incarnation, checkpoint, later)
        for version, group_ids in self.batches.items():
            if version > checkpoint:
                self.twin.restore(group_ids)
            else:
                self.twin.retire(group_ids)
        self.committed = self.published = checkpoint
        self.ceiling = max(self.twin.budget, len(self.twin.outstanding))

    @invariant()
    def twins_agree(self) -> None:
        counts, admission = self.buffer.counts(), self.buffer.admission()
        twin = self.twin
        for name in ("admitted", "retired", "restored", "dropped"):
            assert counts[name] == getattr(twin, name)
        assert counts["outstanding"] == len(twin.outstanding) == twin.admitted - twin.retired + twin.restored
        assert (admission.free, admission.wanted) == (twin.free, twin.wanted)
        assert counts["admitted"] == sum(counts[state] for state in STATES)
        assert self.buffer.verify() == []

    @invariant()
    def budget_holds(self) -> None:
        """Only a rollback raises outstanding above (S + 1)·P; from there it only falls."""
        assert len(self.twin.outstanding) <= self.ceiling
        self.ceiling = max(self.twin.budget, len(self.twin.outstanding))

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()


def test_lua_and_python_agree_at_every_step(redis_url: str) -> None:
    RingMachine.url = redis_url
    run_machine(RingMachine, settings=_QUICK)


def test_lua_and_python_agree_when_every_reply_is_lost_once(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis runs every call twice, because the first reply never arrives."""
    RingMachine.url = redis_url
    ring.lose_every_answer(monkeypatch)
    run_machine(RingMachine, settings=settings(_QUICK, max_examples=20))


@given(
    drop_percent=st.integers(0, 99),
    staleness_budget=st.integers(0, 4),
    groups_per_batch=st.integers(1, 5),
    seed=st.integers(0, 2**16),
)
@example(drop_percent=0, staleness_budget=0, groups_per_batch=2, seed=7)
@example(drop_percent=99, staleness_budget=0, groups_per_batch=2, seed=7)
@example(drop_percent=99, staleness_budget=4, groups_per_batch=2, seed=7)
@settings(max_examples=20, deadline=None)
def test_a_run_never_gets_stuck(
    redis_url: str, drop_percent: int, staleness_budget: int, groups_per_batch: int, seed: int
) -> None:
    """A whole run; a turn that neither admits nor trains is a deadlock."""
    twin = Limiter(groups_per_batch, staleness_budget, target_groups=2 * groups_per_batch)
    buffer, chance = ring.new_run(redis_url, **limits_of(twin)), random.Random(seed)
    version, index = 0, 0
    survivors: list[str] = []
    while version * groups_per_batch < twin.target_groups:
        admitted = twin.admit([f"0-{i}" for i in range(index, index + 7)])
        index += len(admitted)
        assert ring.offer(buffer, 7) == admitted
        ring.move(buffer, "prompts", 100)
        ring.move(buffer, "generated", 100)
        assert [claim.group_id for claim in buffer.claim_scored(1, 100, 0)] == admitted
        rejected = [group_id for group_id in admitted if chance.random() * 100 < drop_percent]
        buffer.drop_claimed(1, rejected, "rejected")
        twin.drop(rejected)
        survivors += [group_id for group_id in admitted if group_id not in rejected]
        batch = survivors[:groups_per_batch] if len(survivors) >= groups_per_batch else []
        assert admitted or batch, "deadlock: nothing was admitted and nothing can be trained"
        if batch:
            del survivors[: len(batch)]
            version += 1
            buffer.record(1, version, batch)
            buffer.publish(1, version, [ring.SAMPLER])
            twin.retire(batch)
        assert len(twin.outstanding) <= twin.budget
    assert twin.wanted == 0 and not twin.outstanding
    assert buffer.mark_exhausted("target") and buffer.exhausted()
    counts = buffer.counts()
    assert (counts["admitted"], counts["dropped"], counts["outstanding"]) == (twin.admitted, twin.dropped, 0)
    assert buffer.verify() == []
    buffer.close()
