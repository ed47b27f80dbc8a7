"""The registry: which samplers may claim prompts, how restarts are handled, and the figures that services report."""

from __future__ import annotations

import time

import pytest

from tandem.protos.errors import FencedError, NotAdmittedError
from tandem.services.buffer.buffer import Buffer
from tests.support import redis_ring as ring


def test_only_a_live_sampler_at_the_published_version_claims(buffer: Buffer) -> None:
    ring.score(buffer, 2)
    ring.offer(buffer, 1)
    with pytest.raises(NotAdmittedError, match="has not registered"):
        buffer.claim("prompts", "stranger", 1, 30, 0)
    ring.train(buffer, 1, 1, 2)
    buffer.register_sampler("rollout-1", "127.0.0.1:9", 2)
    with pytest.raises(NotAdmittedError, match="JOINING"):
        buffer.claim("prompts", "rollout-1", 1, 30, 0)
    buffer.publish(1, 1, ["rollout-1"])
    with pytest.raises(NotAdmittedError, match="STALE at version 0, published is 1"):
        ring.claim(buffer, "prompts")
    assert buffer.claim("prompts", "rollout-1", 1, 30, 0)
    assert not buffer.admit_sampler(1, ring.SAMPLER, 0), "an update to an earlier version admits nobody"
    assert not buffer.admit_sampler(1, "stranger", 1)
    assert buffer.admit_sampler(1, ring.SAMPLER, 1)
    states = {s.id: (s.state, s.version, s.incarnation, s.tensor_parallel_size, s.alive) for s in buffer.samplers()}
    assert states == {"rollout-0": ("LIVE", 1, 1, 1, True), "rollout-1": ("LIVE", 1, 1, 2, True)}
    assert buffer.published_version() == 1
    buffer.begin_incarnation()
    with pytest.raises(NotAdmittedError, match="STALE"):
        ring.claim(buffer, "prompts")


def test_nobody_claims_before_a_version_is_published(redis_url: str) -> None:
    buffer = ring.new_run(redis_url, publishes=False)
    assert buffer.published_version() == -1
    with pytest.raises(NotAdmittedError, match="no version is published"):
        ring.claim(buffer, "prompts")


def test_a_restarted_sampler_gives_its_leases_back_and_its_zombie_is_refused(buffer: Buffer, redis_url: str) -> None:
    ring.offer(buffer, 2)
    zombie_claims = ring.claim(buffer, "prompts", 2)
    time.sleep(0.005)  # the first claim is renewed last but returned first
    buffer.renew(zombie_claims[:1], 30, {zombie_claims[0].token: b"half"})
    reborn = Buffer(redis_url, buffer.run_id)
    reborn.register_sampler(ring.SAMPLER, "127.0.0.1:3", 1)
    assert reborn.admit_sampler(1, ring.SAMPLER, 0)
    counts = buffer.counts()
    assert (counts["prompts_waiting"], counts["leases_expired"]) == (2, 0)
    assert not ring.finish(buffer, zombie_claims[0])
    with pytest.raises(FencedError, match="replaced by a later start"):
        ring.claim(buffer, "prompts")
    buffer.heartbeat(ring.SAMPLER, {"tokens": 1.0})
    assert buffer.figures() == {}, "a zombie's heartbeat is ignored"
    again = ring.claim(reborn, "prompts", 2)
    assert [(claim.group_id, claim.partial) for claim in again] == [("0-0", b"half"), ("0-1", None)]


def test_a_sampler_that_restarts_during_a_broadcast_is_not_admitted_by_it(buffer: Buffer) -> None:
    acknowledged = buffer.samplers()
    buffer.register_sampler(ring.SAMPLER, "127.0.0.1:3", 1)
    buffer.publish(1, 1, acknowledged)
    assert not buffer.admit_sampler(1, acknowledged[0], 1)
    assert buffer.samplers()[0].state == "JOINING"
    assert buffer.admit_sampler(1, buffer.samplers()[0], 1)


def test_services_report_figures_and_heartbeats(buffer: Buffer) -> None:
    buffer.register_service("feed", "127.0.0.1:5")
    buffer.heartbeat("feed", {"rows": 3.0, "seconds": 0.5})
    buffer.heartbeat("feed", {"rows": 4.0, "seconds": 0.75})
    assert buffer.services() == {"feed": "127.0.0.1:5"}
    assert buffer.figures() == {"feed": {"rows": 4.0, "seconds": 0.75}}
    time.sleep(0.06)
    assert not buffer.samplers(alive_within_seconds=0.05)[0].alive
    buffer.heartbeat(ring.SAMPLER, {})
    assert buffer.samplers(alive_within_seconds=5)[0].alive
