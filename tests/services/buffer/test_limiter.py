"""The limiter: budget, no deadlock, the feed's signal. test_buffer_model.py compares it with its Python twin."""

from __future__ import annotations

import random

from hypothesis import example, given, settings
from hypothesis import strategies as st

from tandem.services.buffer.buffer import Buffer
from tests.support import redis_ring as ring
from tests.support.ledger_model import Limiter


def limits_of(twin: Limiter) -> dict[str, int]:
    return {name: getattr(twin, name) for name in ("groups_per_batch", "staleness_budget", "target_groups")}


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


def test_credits_that_return_leave_one_signal_for_the_feed(buffer: Buffer) -> None:
    signal = buffer.connection.key("signal:credits")
    ring.offer(buffer, 4)
    for _ in range(2):
        (claimed,) = ring.claim(buffer, "prompts")
        assert buffer.release(claimed, "crashed", "data") == "dropped"
        assert buffer.connection.redis.llen(signal) == 1
    buffer.connection.wait_for_signal("signal:credits", 5.0)
    assert buffer.connection.redis.llen(signal) == 0
    ring.move(buffer, "prompts", 2)
    ring.move(buffer, "generated", 2)
    incarnation, version = buffer.begin_incarnation(), buffer.published_version() + 1
    ring.train(buffer, incarnation, version, 2)
    assert buffer.connection.redis.llen(signal) == 0, "a credit returns with the publication"
    buffer.publish(incarnation, version, [])
    assert buffer.connection.redis.llen(signal) == 1
