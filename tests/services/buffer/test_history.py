"""What the ledger keeps of a group while it is in progress, and of prompts that fail in every attempt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.history import finished_groups, group_history, group_notes, trained_groups
from tandem.services.run.estimates import NOTES_BYTES, SET_ASIDE_BYTES
from tests.support import redis_ring as ring


@pytest.fixture()
def buffer(redis_url: str) -> Iterator[Buffer]:
    run = ring.new_run(redis_url, groups_per_batch=4, staleness_budget=3, infrastructure=20, data=1)
    yield run
    run.close()


def _fail(buffer: Buffer, group_id: str, reason: str = "crashed") -> None:
    """Fails a waiting prompt until it is dropped."""
    outcome = "requeued"
    while outcome == "requeued":
        claims = ring.claim(buffer, "prompts", 100)
        (failing,) = [claim for claim in claims if claim.group_id == group_id]
        outcome = buffer.release(failing, reason, "data", f"ValueError: {group_id}")
        for claim in claims:
            if claim is not failing:
                buffer.release(claim, "shutdown", "voluntary")
    assert outcome == "dropped"


def test_each_return_of_a_lease_is_kept_with_its_holder_and_reason(buffer: Buffer) -> None:
    ring.offer(buffer, 1)
    (first,) = ring.claim(buffer, "prompts")
    buffer.release(first, "shutdown", "voluntary")
    (second,) = ring.claim(buffer, "prompts")
    buffer.release(second, "unsampleable", "data", "é" * 500)
    (third,) = ring.claim(buffer, "prompts")
    seen = group_history(buffer.connection, "0-0")
    assert (seen.admitted, seen.state, seen.ended, seen.version) == (True, "prompts_leased", "", None)
    assert [(one.stage, one.worker, one.reason) for one in seen.notes.returns] == [
        ("prompts", ring.SAMPLER, "shutdown"),
        ("prompts", ring.SAMPLER, "unsampleable"),
    ]
    assert seen.notes.returns[1].detail == "é" * 80 and seen.failures == {"data": 1}
    assert [(stage, one.worker, one.is_over) for stage, one in seen.notes.leases.items()] == [
        ("prompts", ring.SAMPLER, False)
    ]
    assert ring.finish(buffer, third)
    (scoring,) = ring.claim(buffer, "generated")
    seen = group_history(buffer.connection, "0-0")
    assert [(one.worker, one.is_over) for one in seen.notes.leases.values()] == [
        (ring.SAMPLER, True),
        (ring.SCORER, False),
    ]
    assert seen.notes.leases["prompts"].since < seen.notes.leases["generated"].since
    assert ring.finish(buffer, scoring)
    ring.train(buffer, 1, 1, 1)
    seen = group_history(buffer.connection, "0-0")
    assert (seen.state, seen.version, len(seen.notes.returns)) == ("trained", 1, 2)
    assert trained_groups(buffer.connection) == {"0-0": 1}
    notes = group_notes(buffer.connection, ["0-0", "0-7"])
    assert notes == {"0-0": seen.notes} and seen.notes.admitted_at is not None
    assert seen.notes.admitted_at <= seen.notes.leases["prompts"].since


def test_only_the_last_returns_are_kept_and_none_of_a_group_that_is_over(buffer: Buffer) -> None:
    ring.offer(buffer, 1)
    for attempt in range(12):
        (claim,) = ring.claim(buffer, "prompts")
        buffer.release(claim, f"reason_{attempt}", "infrastructure")
    seen = group_history(buffer.connection, "0-0")
    assert [one.reason for one in seen.notes.returns] == [f"reason_{attempt}" for attempt in range(4, 12)]
    assert seen.notes.num_returns == 12
    _fail(buffer, "0-0")
    seen = group_history(buffer.connection, "0-0")
    assert (seen.state, seen.ended, seen.notes.returns) == ("", "dropped:crashed", [])
    assert not group_history(buffer.connection, "7-7").admitted


def test_the_groups_that_are_over_are_listed_by_how_they_ended(buffer: Buffer) -> None:
    ring.score(buffer, 3)
    ring.train(buffer, 1, 1, 2)
    buffer.publish(1, 1, [ring.SAMPLER])
    buffer.commit(1, 1)
    ring.offer(buffer, 9)
    _fail(buffer, "0-11", "timeout")
    assert finished_groups(buffer.connection) == {"committed": {"0-0", "0-1"}, "dropped:timeout": {"0-11"}}


def test_a_prompt_is_set_aside_once_another_group_is_scored(buffer: Buffer) -> None:
    ring.offer(buffer, 3)
    _fail(buffer, "0-1")
    assert (buffer.set_aside(), buffer.admission().num_set_aside) == ({}, 0), "the scorer may be at fault"
    ring.move(buffer, "prompts")
    ring.move(buffer, "generated")
    assert buffer.set_aside() == {"0-1": "crashed: ValueError: 0-1"}
    assert buffer.admission().num_set_aside == 1
    assert buffer.verify() == []


def test_what_failed_because_of_the_infrastructure_is_not_set_aside(buffer: Buffer) -> None:
    ring.offer(buffer, 2)
    (claim, _) = ring.claim(buffer, "prompts", 2)
    while buffer.release(claim, "infrastructure", "infrastructure") == "requeued":
        (claim,) = ring.claim(buffer, "prompts")
    ring.score(buffer, 1)
    assert buffer.counts()["dropped:infrastructure"] == 1 and buffer.set_aside() == {}


def test_the_prompts_that_failed_before_a_scorer_was_mended_are_admitted_again(buffer: Buffer) -> None:
    ring.score(buffer, 1)
    ring.offer(buffer, 2)
    _fail(buffer, "0-1")
    buffer.create(
        groups_per_batch=4,
        staleness_budget=3,
        target_groups=100,
        failure_budget={"infrastructure": 1, "data": 1},
        resume=True,
    )
    _fail(buffer, "0-2")
    ring.score(buffer, 1)
    assert buffer.set_aside() == {"0-2": "crashed: ValueError: 0-2"}


def test_notes_and_prompts_set_aside_take_less_memory_than_is_estimated(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, groups_per_batch=1200, target_groups=3000, infrastructure=20)
    redis, key, detail = buffer.connection.redis, buffer.connection.key, "x\n" * 200
    ring.offer(buffer, 3)
    before = redis.memory_usage(key("group:0-2")) or 0
    for _ in range(9):
        for claim in ring.claim(buffer, "prompts", 3):
            buffer.release(claim, "r" * 64, "infrastructure", detail)
    assert 8 * 160 < redis.memory_usage(key("group:0-2"), samples=0) - before < NOTES_BYTES
    redis.hset(key("set_aside"), mapping={f"1000-{number}": f"{'r' * 64}: {detail[:160]}" for number in range(999)})
    for claim in ring.claim(buffer, "prompts", 2):
        assert buffer.release(claim, "r" * 64, "data", detail) == "dropped"
    ring.move(buffer, "prompts")
    ring.move(buffer, "generated")
    assert len(buffer.set_aside()) == 1000 and buffer.counts()["dropped"] == 2
    assert 2 * redis.memory_usage(key("set_aside"), samples=0) < SET_ASIDE_BYTES
    buffer.close()
