"""The laws of the ledger: groups are conserved and train exactly once, whichever process is killed."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tandem.protos.errors import LedgerError, RunFolderError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.redis_server import EmbeddedRedis, start_redis
from tandem.services.buffer.types import STATES
from tests.support import redis_ring as ring
from tests.support.buffer_chaos import Chaos


@pytest.fixture()
def buffer(redis_url: str) -> Iterator[Buffer]:
    run = ring.new_run(redis_url, groups_per_batch=2, staleness_budget=3)
    yield run
    run.close()


def _sound(buffer: Buffer) -> dict[str, int]:
    counts = buffer.counts()
    assert buffer.verify() == []
    assert counts["admitted"] == sum(counts[state] for state in STATES)
    assert counts["outstanding"] == counts["admitted"] - counts["retired"] + counts["restored"]
    return counts


# ---- versions ----


def test_a_version_is_recorded_published_and_committed(buffer: Buffer) -> None:
    group_ids = ring.score(buffer, 4)
    first = ring.train(buffer, 1, 1, 2)
    counts = _sound(buffer)
    assert (counts["trained"], counts["outstanding"], counts["retired"]) == (2, 4, 0)
    with pytest.raises(LedgerError, match="no payload"):
        buffer.read(first)
    with pytest.raises(LedgerError, match="cannot be committed before it is published"):
        buffer.commit(1, 1)
    for _ in range(2):  # each call twice, as after a crash between call and reply
        buffer.record(1, 1, first)
        buffer.publish(1, 1, [ring.SAMPLER])
    counts = _sound(buffer)
    assert (counts["trained"], counts["outstanding"], counts["retired"], counts["published_version"]) == (2, 2, 2, 1)
    ring.train(buffer, 1, 2, 2)
    buffer.publish(1, 2, [ring.SAMPLER])
    buffer.commit(1, 1)
    buffer.commit(1, 1)
    counts = _sound(buffer)
    assert (counts["committed"], counts["trained"], counts["outstanding"]) == (2, 2, 0)
    with pytest.raises(LedgerError, match="cannot be published after version 2"):
        buffer.publish(1, 1, [])
    assert group_ids[:2] == first


def test_only_claimed_groups_are_trained_and_a_version_is_recorded_once(buffer: Buffer) -> None:
    group_ids = ring.score(buffer, 4)
    with pytest.raises(LedgerError, match=f"group {group_ids[0]} is scored_waiting"):
        buffer.record(1, 1, group_ids[:1])
    with pytest.raises(LedgerError, match="group 9-9 is unknown"):
        buffer.record(1, 1, ["9-9"])
    ring.train(buffer, 1, 1, 2)
    [claimed] = buffer.claim_scored(1, 1, 0)
    with pytest.raises(LedgerError, match="version 1 was recorded before"):
        buffer.record(1, 1, [claimed.group_id])
    with pytest.raises(LedgerError, match="version 2 cannot train it"):
        buffer.record(1, 2, [group_ids[0]])
    assert _sound(buffer)["scored_claimed"] == 1


def test_rejected_groups_return_their_credit_at_once(buffer: Buffer) -> None:
    group_ids = ring.score(buffer, 4)
    buffer.claim_scored(1, 2, 0)
    buffer.drop_claimed(1, group_ids[:2], "zero_variance")
    buffer.drop_claimed(1, group_ids[:2], "zero_variance")
    counts = _sound(buffer)
    assert (counts["dropped:zero_variance"], counts["outstanding"], counts["retired"]) == (2, 2, 2)
    with pytest.raises(LedgerError, match=f"group {group_ids[2]} is scored_waiting"):
        buffer.drop_claimed(1, group_ids[2:], "zero_variance")


def test_the_end_of_a_run_drops_untrained_groups(buffer: Buffer) -> None:
    ring.score(buffer, 3)
    ring.train(buffer, 1, 1, 1)
    buffer.claim_scored(1, 1, 0)
    ring.offer(buffer, 4)
    [generated] = ring.claim(buffer, "prompts")
    [sampled] = ring.claim(buffer, "prompts")
    ring.finish(buffer, sampled)
    assert buffer.drop_outstanding(1, "run_finished") == 6
    counts = _sound(buffer)
    assert (counts["dropped:run_finished"], counts["trained"], counts["outstanding"]) == (6, 1, 1)
    assert not ring.finish(buffer, generated), "nobody is told, but its result is refused"
    assert buffer.drop_outstanding(1, "run_finished") == 0


# ---- rollback ----


def test_rollback_restores_every_batch_after_the_checkpoint(buffer: Buffer) -> None:
    """Versions 1 to 3 are published, 1 is in the checkpoint, one batch is only on disk, one claim is unrecorded."""
    ring.score(buffer, 8)
    batches = {version: ring.train(buffer, 1, version, 2) for version in (1, 2, 3)}
    buffer.publish(1, 3, [ring.SAMPLER])
    batches[4] = [buffer.claim_scored(1, 1, 0)[0].group_id]
    unrecorded = buffer.claim_scored(1, 1, 0)[0].group_id
    incarnation = buffer.begin_incarnation()
    for _ in range(2):
        buffer.rollback(incarnation, 1, {version: ids for version, ids in batches.items() if version > 1})
        counts = _sound(buffer)
        assert (counts["committed"], counts["trained"], counts["scored_waiting"]) == (2, 5, 1)
        assert (counts["outstanding"], counts["restored"], counts["published_version"]) == (6, 4, 1)
    assert buffer.samplers()[0].state == "STALE"
    buffer.publish(incarnation, 4, [ring.SAMPLER])
    assert _sound(buffer)["outstanding"] == 1
    assert [claim.group_id for claim in buffer.claim_scored(incarnation, 9, 0)] == [unrecorded]


def _lost_at(buffer: Buffer, stage: str) -> str:
    """A group that Redis has at `stage` while the disk records it in version 1."""
    [group_id] = ring.offer(buffer, 1)
    if stage == "prompts_leased":
        ring.claim(buffer, "prompts")
    if stage.startswith(("generated", "scored", "dropped")):
        ring.move(buffer, "prompts")
    if stage == "generated_leased":
        buffer.renew(ring.claim(buffer, "generated"), 30, {group_id: b"half"})
    if stage.startswith("scored"):
        ring.move(buffer, "generated")
    if stage == "scored_claimed":
        buffer.claim_scored(1, 1, 0)
    if stage == "dropped":
        buffer.release(ring.claim(buffer, "generated")[0], "broken", "data")
    return group_id


@pytest.mark.parametrize("checkpoint", [0, 1])
@pytest.mark.parametrize("stage", [*STATES[:6], "dropped", "unknown"])
def test_rollback_follows_the_disk_where_redis_lost_writes(buffer: Buffer, stage: str, checkpoint: int) -> None:
    """A recorded group enters the weights once: trained again after the checkpoint, or committed with it."""
    group_id = "0-0" if stage == "unknown" else _lost_at(buffer, stage)
    incarnation = buffer.begin_incarnation()
    for _ in range(2):
        buffer.rollback(incarnation, checkpoint, {1: [group_id]})
        counts = _sound(buffer)
        assert (counts["admitted"], counts["dropped"]) == (1, 0)
        expected = (0, 1, 0) if checkpoint else (1, 0, 1)
        assert (counts["trained"], counts["committed"], counts["outstanding"]) == expected
    assert not ring.claim(buffer, "generated") and not buffer.claim_scored(incarnation, 9, 0)
    left = buffer.connection.redis.scan_iter(f"{buffer.connection.prefix}pa*".replace("{", "[{]"))
    assert list(left) == [], "neither payload nor partial result is left behind"
    buffer.publish(incarnation, 1, [ring.SAMPLER])
    assert _sound(buffer)["outstanding"] == 0
    # A feed that lost its position too offers the group again; it is skipped, not admitted twice.
    if stage == "unknown":
        assert ring.offer(buffer, 2, start=0) == ["0-0", "0-1"]
        assert (_sound(buffer)["admitted"], buffer.admission().cursor) == (2, 2)


def test_an_emptied_redis_is_rebuilt_from_the_disk(buffer: Buffer) -> None:
    buffer.rollback(1, 3, {1: ["0-0"], 2: ["0-1"], 3: ["0-2"], 4: ["0-3"], 5: ["0-4", "0-5"]})
    counts = _sound(buffer)
    assert (counts["admitted"], counts["committed"], counts["trained"], counts["outstanding"]) == (6, 3, 3, 3)
    assert counts["published_version"] == 3


def test_an_earlier_checkpoint_restores_committed_groups(buffer: Buffer) -> None:
    """The last checkpoint was lost after its commit; its batches are still recorded."""
    ring.score(buffer, 4)
    batches = {version: ring.train(buffer, 1, version, 2) for version in (1, 2)}
    buffer.publish(1, 2, [ring.SAMPLER])
    buffer.commit(1, 2)
    incarnation = buffer.begin_incarnation()
    buffer.rollback(incarnation, 1, {2: batches[2]})
    counts = _sound(buffer)
    assert (counts["committed"], counts["trained"], counts["outstanding"]) == (2, 2, 2)


@pytest.mark.parametrize(
    ("recorded", "message"),
    [
        ({3: ["0-4"]}, "version 2 trained group 0-2, but no record"),
        ({3: ["0-2", "0-3"]}, "group 0-2 is recorded in version 3, but Redis knows it as trained in version 2"),
        ({2: ["0-2", "0-3"], 3: ["0-2"]}, "group 0-2 is recorded in versions 2 and 3"),
    ],
)
def test_a_disk_that_contradicts_redis_is_refused_and_changes_nothing(
    buffer: Buffer, recorded: Mapping[int, list[str]], message: str
) -> None:
    ring.score(buffer, 6)
    for version in (1, 2):
        ring.train(buffer, 1, version, 2)
    before = _sound(buffer)
    with pytest.raises(LedgerError, match=message):
        buffer.rollback(1, 1, recorded)
    assert _sound(buffer) == before


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_disk_that_ends_below_a_recorded_version_is_refused(buffer: Buffer, is_committed: bool) -> None:
    """The folder of another run, or an empty one: its trainer would train what is trained."""
    ring.score(buffer, 4)
    batches = {version: ring.train(buffer, 1, version, 2) for version in (1, 2)}
    buffer.publish(1, 2, [ring.SAMPLER])
    if is_committed:
        buffer.commit(1, 2)
    before = _sound(buffer)
    for checkpoint, recorded in ((0, {}), (1, {}), (0, {1: batches[1]})):
        with pytest.raises(RunFolderError, match="ledger has version 2 as recorded: name the folder"):
            buffer.rollback(1, checkpoint, recorded)
    assert _sound(buffer) == before


def test_a_version_is_published_only_if_its_groups_are_recorded_in_it(buffer: Buffer) -> None:
    group_ids = ring.score(buffer, 4)
    first = ring.train(buffer, 1, 1, 2)
    for named, state in ((group_ids, "scored_waiting"), ([*first, "9-9"], "unknown")):
        with pytest.raises(LedgerError, match=f"version 1 cannot be published: group .* is {state}"):
            buffer.publish(1, 1, [], named)
    second = ring.train(buffer, 1, 2, 2)
    with pytest.raises(LedgerError, match=f"group {second[0]} is trained, not trained in it"):
        buffer.publish(1, 1, [], second)
    assert buffer.published_version() == 0
    buffer.publish(1, 1, [], first)
    assert _sound(buffer)["retired"] == 2


def test_restored_groups_may_exceed_the_budget_but_nothing_is_admitted_meanwhile(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, groups_per_batch=2, staleness_budget=0)
    batches = {}
    for version in (1, 2, 3):
        ring.score(buffer, 2)
        batches[version] = ring.train(buffer, 1, version, 2)
        buffer.publish(1, version, [ring.SAMPLER])
    ring.offer(buffer, 2)
    incarnation = buffer.begin_incarnation()
    buffer.rollback(incarnation, 0, batches)
    assert _sound(buffer)["outstanding"] == 8 and ring.offer(buffer, 2) == []
    buffer.publish(incarnation, 3, [ring.SAMPLER])
    assert _sound(buffer)["outstanding"] == 2 and ring.offer(buffer, 2) == []


# ---- verify ----

_TAMPERINGS = {
    "stands in no queue": ("ZPOPMIN", "prompts_waiting"),
    "stands in prompts_waiting and in generated_waiting": ("ZADD", "generated_waiting", 1, "0-3"),
    "has no payload": ("DEL", "payload:0-3"),
    "has no headers": ("HDEL", "group:0-2", "headers"),
    "has a token": ("HSET", "group:0-3", "token", 1),
    "is not outstanding": ("SREM", "outstanding", "0-3"),
    "is still outstanding": ("SADD", "outstanding", "0-1"),
    "admitted counts 5, marked are 4": ("HINCRBY", "counters", "admitted", 1),
    "admitted are 4, the states add up to 3": ("HSET", "counters", "committed", 0),
    "the reasons add up to 0": ("HSET", "counters", "dropped", 1),
    "outstanding are 2": ("HINCRBY", "counters", "retired", 1),
    "was never admitted": ("SETBIT", "bits:0:admitted", 3, 0),
    "is also committed": ("SETBIT", "bits:0:committed", 3, 1),
    "version 2 is committed, and group 0-1 of it or before is not": ("HSET", "meta", "committed_version", 2),
    "group 0-7 (over) stands in scored_waiting": ("ZADD", "scored_waiting", 1, "0-7"),
    "group 0-7 (over) is still outstanding": ("SADD", "outstanding", "0-7"),
    "3 groups stand in queues, 2 have a state": ("HDEL", "states", "0-3"),
}


@pytest.mark.parametrize("violation", _TAMPERINGS)
def test_verify_names_the_violation(buffer: Buffer, violation: str) -> None:
    ring.score(buffer, 3)
    ring.train(buffer, 1, 1, 1)
    buffer.publish(1, 1, [ring.SAMPLER])
    buffer.commit(1, 1)
    ring.train(buffer, 1, 2, 1)
    buffer.publish(1, 2, [ring.SAMPLER])
    ring.offer(buffer, 1)
    assert buffer.verify() == []
    command, key, *values = _TAMPERINGS[violation]
    buffer.connection.redis.execute_command(command, buffer.connection.key(str(key)), *values)
    found = buffer.verify()
    assert any(violation in line for line in found), found


# ---- kills ----


def _assert_finished(chaos: Chaos) -> None:
    counts = _sound(chaos.buffer)
    total = chaos.NUM_BATCHES * chaos.GROUPS_PER_BATCH
    trained = [group_id for group_ids in chaos.records.values() for group_id in group_ids]
    assert len(trained) == len(set(trained)) == total, "an instance entered the weights twice"
    assert (counts["committed"], counts["outstanding"]) == (total, 0)
    assert counts["admitted"] == total + counts["dropped"]
    assert counts["dropped"] == sum(number for name, number in counts.items() if name.startswith("dropped:"))
    assert chaos.num_checks > 20 and chaos.num_disturbances >= 5 and not chaos.deaths
    chaos.assert_acknowledged_results_are_there()


@pytest.fixture
def servers(memory_folder: Path) -> Iterator[list[EmbeddedRedis]]:
    """The server, and those that a test starts after it."""
    started = [start_redis(memory_folder)]
    yield started
    for server in started:
        server.stop()


def test_no_group_is_lost_when_workers_and_the_trainer_die(memory_folder: Path, servers: list[EmbeddedRedis]) -> None:
    chaos = Chaos(memory_folder, servers[0].url, seed=1)
    chaos.run(chaos.kill_a_worker, 100)
    _assert_finished(chaos)


def test_a_redis_killed_repeatedly_loses_no_acknowledged_write(
    memory_folder: Path, servers: list[EmbeddedRedis]
) -> None:
    chaos = Chaos(memory_folder, servers[0].url, seed=2)

    def disturb() -> None:
        os.kill(servers[-1].pid, signal.SIGKILL)
        servers.append(start_redis(memory_folder))  # it dies with the thread that starts it
        assert chaos.buffer.verify() == []
        chaos.assert_acknowledged_results_are_there()

    chaos.run(disturb, 100)
    _assert_finished(chaos)
