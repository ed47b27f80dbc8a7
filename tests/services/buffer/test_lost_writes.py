"""A Redis that loses its last writes while everybody lives: it is noticed, and the run goes on from the disk."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tandem.protos.errors import FencedError, LostWritesError, NotAdmittedError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.connection import Connection
from tandem.services.buffer.types import STATES
from tests.support import redis_ring as ring


@pytest.fixture()
def buffer(redis_url: str) -> Iterator[Buffer]:
    """A synchronous run (S = 0) of two groups a batch."""
    run = ring.new_run(redis_url, groups_per_batch=2, staleness_budget=0)
    yield run
    run.close()


def sound(buffer: Buffer) -> dict[str, int]:
    counts = buffer.counts()
    assert buffer.verify() == []
    assert counts["admitted"] == sum(counts[state] for state in STATES)
    return counts


class Trainer:
    """A trainer with a disk that survives: it claims, writes to disk, records, publishes and commits, step by step."""

    P = 2

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.disk: dict[int, list[str]] = {}
        self.checkpoint = 0
        self.claimed: list[str] = []
        self.version = self.incarnation = self.resumed = 0
        self.published = 0
        self.num_takeovers = 0
        self.take_over()

    def take_over(self) -> None:
        self.num_takeovers += 1
        self.incarnation = self.buffer.begin_incarnation(self.incarnation)
        self.buffer.rollback(self.incarnation, self.checkpoint, self.disk)
        self.claimed = []
        self.version = self.resumed = max([self.checkpoint, *self.disk])
        self.publish()

    def claim(self) -> None:
        wanted = self.P - len(self.claimed)
        self.claimed += [claim.group_id for claim in self.buffer.claim_scored(self.incarnation, wanted, 0)]

    def write(self) -> None:
        self.buffer.check_incarnation(self.incarnation)
        self.version += 1
        self.disk[self.version] = self.claimed
        self.claimed = []

    def record(self) -> None:
        self.buffer.record(self.incarnation, self.version, self.disk[self.version])

    def publish(self) -> None:
        trained = self.disk.get(self.version, []) if self.version > self.resumed else []
        self.buffer.publish(self.incarnation, self.version, [ring.SAMPLER], trained)
        self.published = self.version

    def commit(self) -> None:
        self.checkpoint = self.version
        self.buffer.commit(self.incarnation, self.version)

    def train(self) -> None:
        """One batch; of the disk's groups none is claimed again."""
        self.claim()
        assert len(self.claimed) == self.P
        self.write()
        self.record()
        self.publish()

    @property
    def trained(self) -> list[str]:
        return [group_id for group_ids in self.disk.values() for group_id in group_ids]


@pytest.mark.parametrize("lost", ["claim", "write and record", "publish", "commit"])
def test_a_lost_change_of_the_trainer_fences_it_and_its_successor_goes_on_from_the_disk(
    buffer: Buffer, lost: str
) -> None:
    """Other services change the ledger before the trainer's next call, so that the loss cannot be seen in its size."""
    trainer = Trainer(buffer)
    ring.score(buffer, 2)
    steps: dict[str, list[Callable[[], None]]] = {
        "claim": [trainer.claim],
        "write and record": [trainer.write, trainer.record],
        "publish": [trainer.publish],
        "commit": [trainer.commit],
    }
    for name, calls in steps.items():
        if name != lost:
            for call in calls:
                call()
            continue
        with ring.losing_writes(buffer):
            for call in calls:
                call()
        break
    ring.offer(buffer, 2)
    ring.move(buffer, "prompts", 2)
    for _ in range(2):  # it stays fenced
        with pytest.raises(LostWritesError, match="has lost writes: it knows change"):
            buffer.check_incarnation(trainer.incarnation)
        with pytest.raises(LostWritesError):
            buffer.claim_scored(trainer.incarnation, 2, 0)
    trainer.take_over()
    for _ in range(3):
        sound(buffer)
        while buffer.counts()["scored_waiting"] < 2:
            ring.offer(buffer, 2)
            ring.move(buffer, "prompts", 2)
            ring.move(buffer, "generated", 2)
        trainer.train()
    assert sorted(trainer.trained) == [f"0-{index}" for index in range(len(trainer.trained))]
    assert sound(buffer)["outstanding"] == 0


def test_a_redis_that_restarts_with_everything_fences_nobody(buffer: Buffer) -> None:
    trainer = Trainer(buffer)
    ring.score(buffer, 2)
    trainer.claim()
    ring.restore_keys(buffer, ring.saved_keys(buffer))
    trainer.write()
    trainer.record()
    ring.restore_keys(buffer, ring.saved_keys(buffer))
    trainer.publish()
    assert trainer.num_takeovers == 1 and sound(buffer)["outstanding"] == 0


def test_an_incarnation_that_redis_has_lost_is_not_begun_again(buffer: Buffer) -> None:
    """Samplers carry weights of it, and records name it."""
    with ring.losing_writes(buffer):
        lost = buffer.begin_incarnation()
    with pytest.raises(FencedError):
        buffer.check_incarnation(lost)
    assert buffer.begin_incarnation(above=lost) == lost + 1


@pytest.mark.parametrize("was_known", [False, True])
def test_a_sampler_whose_registration_redis_has_lost_registers_again(
    buffer: Buffer, redis_url: str, was_known: bool
) -> None:
    trainer, name = Trainer(buffer), ring.SAMPLER if was_known else "rollout-1"
    ring.offer(buffer, 2)
    sampler = Buffer(redis_url, buffer.run_id)
    with ring.losing_writes(buffer):
        sampler.register_sampler(name, "127.0.0.1:2", 1)
    assert sampler.claim("prompts", name, 1, 30.0, 0.0) == []
    with pytest.raises(NotAdmittedError, match="is JOINING"):
        sampler.claim("prompts", name, 1, 30.0, 0.0)
    (known,) = [one for one in buffer.samplers() if one.id == name]
    assert buffer.admit_sampler(trainer.incarnation, known, 0)
    assert len(sampler.claim("prompts", name, 1, 30.0, 0.0)) == 1
    sampler.close()


@pytest.mark.parametrize("name", ["reward", ring.SAMPLER])
def test_a_heartbeat_registers_again_what_redis_has_lost(buffer: Buffer, redis_url: str, name: str) -> None:
    ring.score(buffer, 1)
    service = Buffer(redis_url, buffer.run_id)
    with ring.losing_writes(buffer):
        if name == ring.SAMPLER:
            service.register_sampler(name, "127.0.0.1:9", 1)
        else:
            service.register_service(name, "127.0.0.1:9")
    assert service.heartbeat(name, {"done": 1.0}) == ""
    addresses = buffer.services() | {one.id: one.address for one in buffer.samplers()}
    assert addresses[name] == "127.0.0.1:9"
    assert service.heartbeat(name, {}) == "" and buffer.figures()[name] == {}
    later = Buffer(redis_url, buffer.run_id)
    later.register_service(name, "127.0.0.1:10")
    assert service.heartbeat(name, {}) == "replaced", "a later start is not taken for a loss"
    later.close()
    service.close()


def test_a_heartbeat_does_not_take_its_own_new_registration_for_a_later_start(
    buffer: Buffer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread finds the registration lost while the heartbeat is under way."""
    sampler, original = Buffer(redis_url, buffer.run_id), Connection.run
    sampler.register_sampler("rollout-1", "127.0.0.1:2", 1)
    seen: list[object] = []

    def run(self: Connection, name: str, *arguments: bytes | str | int) -> object:
        if name == "heartbeat" and not seen:
            sampler._register_again("rollout-1", sampler._generation("rollout-1"))
        seen.extend(arguments[1:2] if name == "heartbeat" else ())
        return original(self, name, *arguments)

    monkeypatch.setattr(Connection, "run", run)
    assert sampler.heartbeat("rollout-1", {}) == ""
    assert len(seen) == 2 and seen[0] != seen[1]
    monkeypatch.undo()
    buffer.register_sampler("rollout-1", "127.0.0.1:3", 1)
    assert sampler.heartbeat("rollout-1", {}) == "replaced"
    sampler.close()


def test_threads_that_find_one_registration_lost_register_once(buffer: Buffer, redis_url: str) -> None:
    sampler = Buffer(redis_url, buffer.run_id)
    sampler.register_sampler("rollout-1", "127.0.0.1:2", 1)
    seen = sampler._generation("rollout-1")
    for _ in range(2):
        sampler._register_again("rollout-1", seen)
    assert [one.num_starts for one in buffer.samplers() if one.id == "rollout-1"] == [2]
    sampler.close()


def test_a_start_that_redis_has_lost_is_not_taken_for_the_next_one(buffer: Buffer, redis_url: str) -> None:
    """The weights that the first process got are not those of the second one."""
    trainer, name = Trainer(buffer), "rollout-1"
    first, second = Buffer(redis_url, buffer.run_id), Buffer(redis_url, buffer.run_id)
    with ring.losing_writes(buffer):
        first.register_sampler(name, "127.0.0.1:2", 1)
        (updated,) = [one for one in buffer.samplers() if one.id == name]
    second.register_sampler(name, "127.0.0.1:3", 1)
    assert not buffer.admit_sampler(trainer.incarnation, updated, 0)
    buffer.publish(trainer.incarnation, 0, [updated])
    with pytest.raises(FencedError, match="was replaced by a later start"):
        first.claim("prompts", name, 1, 30.0, 0.0)
    with pytest.raises(NotAdmittedError, match="is JOINING"):
        second.claim("prompts", name, 1, 30.0, 0.0)
    for one in (first, second):
        one.close()


def test_a_start_that_redis_has_lost_does_not_admit_the_one_before_it(buffer: Buffer, redis_url: str) -> None:
    """The process of the start before may still run, and its weights are older."""
    trainer, name = Trainer(buffer), "rollout-1"
    first, second = Buffer(redis_url, buffer.run_id), Buffer(redis_url, buffer.run_id)
    first.register_sampler(name, "127.0.0.1:2", 1)
    with ring.losing_writes(buffer):
        second.register_sampler(name, "127.0.0.1:3", 1)
        (updated,) = [one for one in buffer.samplers() if one.id == name]
    assert not buffer.admit_sampler(trainer.incarnation, updated, 0)
    with pytest.raises(NotAdmittedError, match="is JOINING"):
        first.claim("prompts", name, 1, 30.0, 0.0)
    for one in (first, second):
        one.close()


def test_a_full_redis_takes_every_call_that_makes_room(buffer: Buffer, redis_url: str) -> None:
    trainer = Trainer(buffer)
    ring.score(buffer, 2)
    trainer.claim()
    trainer.write()
    buffer.connection.redis.config_set("maxmemory", 1)
    try:
        trainer.record()
        trainer.publish()
        trainer.commit()
    finally:
        buffer.connection.redis.config_set("maxmemory", 0)
    assert sound(buffer)["committed"] == 2
