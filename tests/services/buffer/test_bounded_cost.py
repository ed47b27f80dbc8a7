"""The cost of a call is that of the groups that it is about, and what concerns many groups is done in several calls."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from tandem.protos.row_headers import encode_headers
from tandem.protos.types import RowHeader, VersionSpan
from tandem.services.buffer import verification
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.connection import Connection
from tandem.services.buffer.types import STATES
from tandem.services.config import parse_recipe
from tandem.services.run.estimates import EPOCH_BYTES, worst_case_redis_bytes
from tests.support import redis_ring as ring


@pytest.fixture()
def buffer(redis_url: str) -> Iterator[Buffer]:
    run = ring.new_run(redis_url, groups_per_batch=2, staleness_budget=3)
    yield run
    run.close()


def _sound(buffer: Buffer) -> dict[str, int]:
    counts = buffer.counts()
    assert buffer.verify() == []
    assert counts["admitted"] == sum(counts[state] for state in STATES)
    return counts


def _cost(buffer: Buffer, call: Callable[[], object]) -> int:
    """The number of commands that Redis runs for a call, those in scripts included."""
    stats = [buffer.connection.redis.info("commandstats")]
    call()
    stats.append(buffer.connection.redis.info("commandstats"))
    before, after = (sum(figures["calls"] for figures in stat.values()) for stat in stats)
    return after - before


def _measured(monkeypatch: pytest.MonkeyPatch, buffer: Buffer) -> list[int]:
    """The cost of each script that is run from now on."""
    original, costs = Connection.run, list[int]()

    def run(self: Connection, name: str, *arguments: bytes | str | int) -> object:
        answers: list[object] = []
        costs.append(_cost(buffer, lambda: answers.append(original(self, name, *arguments))))
        return answers[0]

    monkeypatch.setattr(Connection, "run", run)
    return costs


def _four_versions(url: str) -> Buffer:
    """Versions 1 to 4 are trained, version 1 is published, none is committed, two claimed groups are unrecorded."""
    buffer = ring.new_run(url, groups_per_batch=2, staleness_budget=9)
    ring.score(buffer, 10)
    for version in (1, 2, 3, 4):
        ring.train(buffer, 1, version, 2)
    buffer.publish(1, 1, [ring.SAMPLER])
    buffer.claim_scored(1, 2, 0)
    return buffer


_RECORDS = {version: [f"0-{2 * version - 2}", f"0-{2 * version - 1}"] for version in (1, 2, 3, 4)}
_IN_PARTS: dict[str, Callable[[Buffer, int], object]] = {
    "publish and commit": lambda buffer, inc: (buffer.publish(inc, 4, [ring.SAMPLER]), buffer.commit(inc, 4)),
    "rollback": lambda buffer, inc: buffer.rollback(inc, 2, _RECORDS),
}


@pytest.mark.parametrize("verb", _IN_PARTS)
def test_a_trainer_that_dies_between_two_calls_of_a_verb_leaves_a_sound_ledger(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    calm = _four_versions(redis_url)
    _IN_PARTS[verb](calm, 1)
    calm.rollback(calm.begin_incarnation(), 2, _RECORDS)
    expected = _sound(calm) | {"retired": 0, "restored": 0}
    assert calm.committed_version() == 2
    original = Connection.run
    for survived in range(20):
        buffer = _four_versions(redis_url)
        calls = itertools.count(1)

        def run(self: Connection, name: str, *arguments: bytes | str | int, calls: Iterator[int] = calls) -> object:
            if next(calls) > survived:  # noqa: B023
                raise KeyboardInterrupt
            return original(self, name, *arguments)

        with monkeypatch.context() as patched:
            patched.setattr(Connection, "run", run)
            with contextlib.suppress(KeyboardInterrupt):
                _IN_PARTS[verb](buffer, 1)
        died = next(calls) > survived + 1
        _sound(buffer)
        buffer.rollback(buffer.begin_incarnation(), 2, _RECORDS)
        assert _sound(buffer) | {"retired": 0, "restored": 0} == expected, survived
        assert buffer.committed_version() == 2
        buffer.close()
        if not died:
            break
    assert survived > 5, "the verb took several calls"
    calm.close()


def test_a_run_takes_less_memory_than_is_estimated(redis_url: str) -> None:
    def used() -> int:
        return int(buffer.connection.server_info("memory")["used_memory"])

    run = {"run_id": "memory", "groups_per_batch": 100, "staleness_budget": 1, "total_batches": 6}
    values = {"run": run, "model": {"path": "m"}, "data": {"train_file": "t"}, "trainer": {"checkpoint_every": 5}}
    recipe = parse_recipe(values | {"rollout": {"samples_per_prompt": 8, "max_response_tokens": 100}})
    rows = [
        RowHeader("0-0", row, 0, "policy", 1000, 100, 1.0, (VersionSpan(0, 1, 0),), "stop", 0.5) for row in range(8)
    ]
    payload = b"x" * (8 * recipe.max_model_tokens * 13)
    buffer = ring.new_run(redis_url, groups_per_batch=100, staleness_budget=1, target_groups=700)
    buffer.connection.redis.memory_purge()
    before = used()
    for version in range(1, 8):
        ring.offer(buffer, 100)
        ring.move(buffer, "prompts", 100)
        finished = [(claim, payload, encode_headers(rows)) for claim in ring.claim(buffer, "generated", 100)]
        assert buffer.complete_all(finished) == []
        if version < 6:
            ring.train(buffer, 1, version, 100)
            buffer.publish(1, version, [ring.SAMPLER])
    assert buffer.counts()["trained"] == 500 and buffer.counts()["scored_waiting"] == 200
    grown = used() - before
    payloads = 200 * len(payload)
    estimate = worst_case_redis_bytes(recipe, 1000)
    assert payloads < grown < estimate, (grown - payloads, estimate - payloads)
    buffer.connection.redis.unlink(*buffer.connection.redis.keys(buffer.connection.key("*")))
    buffer.close()


def test_an_epoch_takes_less_memory_than_is_estimated(redis_url: str) -> None:
    """One of two groups: one is committed, the other one is dropped."""
    buffer = ring.new_run(redis_url, groups_per_batch=300, target_groups=600)
    group_ids = [[f"{epoch}-{index}" for epoch in range(300)] for index in range(2)]
    for ids in group_ids:
        assert buffer.admit([(group_id, b"") for group_id in ids], 0) == 300
    ring.move(buffer, "prompts", 300)
    ring.move(buffer, "generated", 300)
    ring.train(buffer, 1, 1, 300)
    buffer.publish(1, 1, [ring.SAMPLER])
    buffer.commit(1, 1)
    assert buffer.drop_outstanding(1, "run_ended") == 300
    redis, key = buffer.connection.redis, buffer.connection.key
    of_epochs = [key("epochs").encode(), *redis.keys(key("maps:*")), *redis.keys(key("bits:*"))]
    assert len(of_epochs) == 1 + 300 + 3 * 300
    used = sum(redis.memory_usage(name, samples=0) or 0 for name in of_epochs) / 300
    assert 0.4 * EPOCH_BYTES < used < EPOCH_BYTES, used
    buffer.close()


def test_a_version_that_redis_forgot_keeps_later_ones_above_the_committed_version(buffer: Buffer) -> None:
    """The records of the later versions are then read again, and the forgotten groups are committed with them."""
    ring.score(buffer, 6)
    ring.train(buffer, 1, 1, 2)
    forgotten = [claim.group_id for claim in buffer.claim_scored(1, 2, 0)]
    later = ring.train(buffer, 1, 3, 2)
    buffer.publish(1, 3, [ring.SAMPLER])
    buffer.commit(1, 3)
    assert buffer.committed_version() == 1
    buffer.rollback(1, 3, {2: forgotten, 3: later})
    assert (_sound(buffer)["committed"], buffer.committed_version()) == (6, 3)


def test_the_work_of_the_trainer_s_verbs_does_not_grow_with_the_trained_versions(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, groups_per_batch=2, staleness_budget=9, target_groups=1000)
    costs = []
    for first in (1, 41):
        for version in range(first, first + 40):
            ring.score(buffer, 2)
            batch = ring.train(buffer, 1, version, 2)
            publishing = _cost(buffer, lambda: buffer.publish(1, version, [ring.SAMPLER]))  # noqa: B023
        buffer.commit(1, first + 38)
        rolling_back = _cost(buffer, lambda: buffer.rollback(1, first + 38, {first + 39: batch}))  # noqa: B023
        buffer.publish(1, first + 39, [ring.SAMPLER])
        costs.append((publishing, rolling_back, _cost(buffer, lambda: buffer.commit(1, first + 39))))  # noqa: B023
    assert costs[0] == costs[1]
    single = ring.new_run(redis_url, groups_per_batch=2)
    ring.score(single, 2)
    ring.train(single, 1, 1, 2)
    single.connection.redis.rpush(single.connection.key("signal:credits"), "1")  # as after every publication
    assert _cost(single, lambda: single.publish(1, 1, [ring.SAMPLER])) == costs[0][0], (
        "39 versions wait for their commit"
    )
    single.close()
    buffer.close()


def test_no_call_of_the_check_grows_with_the_epochs_of_a_run(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small dataset has thousands of them."""
    costs, calls = [], _measured(monkeypatch, buffer)
    redis, key = buffer.connection.redis, buffer.connection.key
    for epoch in range(400):
        redis.sadd(key("epochs"), epoch)
        for outcome in ("admitted", "committed"):
            redis.sadd(key(f"maps:{epoch}"), outcome)
            redis.setbit(key(f"bits:{epoch}:{outcome}"), epoch % 8, 1)
            redis.hincrby(key("counters"), outcome, 1)
        redis.hincrby(key("counters"), "retired", 1)
        if epoch in (2, 399):
            calls.clear()
            assert buffer.verify() == []
            costs.append(max(calls))
    assert costs[1] <= costs[0] + 2, "once a second, a script writes the clock"
    redis.setbit(key("bits:300:committed"), 4, 0)
    assert buffer.verify() == ["committed counts 400, marked are 399"]


def test_the_check_allows_for_groups_that_end_while_it_counts(buffer: Buffer, monkeypatch: pytest.MonkeyPatch) -> None:
    original, versions = verification._marked, itertools.count(1)

    def marked(connection: Connection) -> Counter[str]:
        found, version = original(connection), next(versions)
        ring.score(buffer, 2)
        ring.train(buffer, 1, version, 2)
        buffer.publish(1, version, [ring.SAMPLER])
        buffer.commit(1, version)
        return found

    monkeypatch.setattr(verification, "_marked", marked)
    assert buffer.verify() == []
    assert next(versions) > 1


def test_the_end_of_a_run_drops_any_number_of_groups_and_at_most_those_that_were_there(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, groups_per_batch=600, target_groups=600)
    ring.offer(buffer, 600)
    assert buffer.drop_outstanding(1, "run_finished") == 600
    assert _sound(buffer)["dropped:run_finished"] == 600
    buffer.close()


def test_a_restart_gives_back_any_number_of_leases_and_costs_those_of_no_other_worker(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, groups_per_batch=700, target_groups=700)
    ring.offer(buffer, 700)
    costs = []
    for leases_of_the_other in (2, 600):
        buffer.register_sampler("rollout-1", "127.0.0.1:9", 1)
        assert buffer.admit_sampler(1, "rollout-1", 0)
        assert len(buffer.claim("prompts", "rollout-1", 3, 30, 0)) == 3
        ring.claim(buffer, "prompts", leases_of_the_other)
        costs.append(_cost(buffer, lambda: buffer.register_sampler("rollout-1", "127.0.0.1:3", 1)))
    assert costs[0] == costs[1]
    buffer.register_sampler(ring.SAMPLER, "127.0.0.1:3", 1)
    assert buffer.counts()["prompts_waiting"] == 700 and buffer.counts()["leases_expired"] == 0
    assert buffer.admit_sampler(1, ring.SAMPLER, 0)
    again = [claim.group_id for claim in ring.claim(buffer, "prompts", 700)]
    expected = [*range(3, 605), 0, 1, 2, *range(605, 700)]
    assert again == [f"0-{index}" for index in expected], "to the front, in the order in which they were claimed"
    assert buffer.verify() == []
    buffer.connection.redis.zrem(buffer.connection.key(f"leases:{ring.SAMPLER}"), "0-3")
    assert buffer.verify() == ["group 0-3 (prompts_leased) is not among the leases of its worker"]
    buffer.close()


def test_no_call_about_leases_grows_with_their_number(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ring.new_run(redis_url, groups_per_batch=1000, target_groups=1000)
    ring.offer(buffer, 900)
    costs, calls = [], _measured(monkeypatch, buffer)
    for number in (200, 700):
        calls.clear()
        held = ring.claim(buffer, "prompts", number)
        assert buffer.renew(held, 30.0, {held[-1].token: b"half"}) == []
        assert buffer.complete_all([(claim, b"answers", "") for claim in held]) == []
        costs.append(max(calls))
    assert costs[1] <= costs[0] + 2
    assert buffer.counts()["generated_waiting"] == 900 and buffer.verify() == []
    buffer.close()


def test_many_leases_that_expire_at_once_are_all_refused_though_a_call_requeues_only_some(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, groups_per_batch=600, target_groups=600)
    ring.offer(buffer, 600)
    late = ring.claim(buffer, "prompts", 600)
    buffer.connection.redis.zadd(buffer.connection.key("prompts_leased"), {claim.group_id: 1 for claim in late})
    last = late[-100:]
    assert buffer.complete_all([(claim, b"late", "") for claim in last]) == [claim.token for claim in last]
    assert buffer.counts()["leases_expired"] < 600
    again = [claim.group_id for _ in range(3) for claim in ring.claim(buffer, "prompts", 600)]
    assert sorted(again) == sorted(claim.group_id for claim in late)
    assert buffer.verify() == []
    buffer.close()
