"""Publishing to samplers that join, fail and leave: real Redis, gRPC and weight groups; only the engine is faked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tandem.protos.errors import FencedError, WeightTransferError
from tandem.protos.manifest import weights_digest
from tandem.protos.types import WeightManifest
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.services.process import in_thread
from tandem.services.trainer import publisher
from tandem.services.trainer.publisher import Publisher
from tests.support.publishing_ring import FakeSampler, PublishingRing
from tests.support.waiting import eventually

CPU = torch.device("cpu")
DISK = {"backend": "disk"}


@pytest.fixture
def ring(tmp_path: Path, redis_url: str, request: pytest.FixtureRequest) -> Iterator[PublishingRing]:
    made = PublishingRing(tmp_path, redis_url, **getattr(request, "param", {}))
    yield made
    made.close()


every_backend = pytest.mark.parametrize("ring", [{"backend": "gloo"}, {"backend": "disk"}], indirect=True)
differences = pytest.mark.parametrize("ring", [{"encoding": "delta"}], indirect=True)
patient = pytest.mark.parametrize("ring", [{"deadline_seconds": 600.0}], indirect=True)
"""Its deadline is longer than a test's time limit, so a publication that waits for it fails the test."""


@every_backend
def test_a_version_reaches_every_sampler(ring: PublishingRing) -> None:
    one, two = ring.sampler("rollout-0"), ring.sampler("rollout-1")
    for version in range(4):
        publication = ring.publish(version)
        assert publication.samplers_acknowledged == 2
        assert (publication.weight_transfer_seconds, publication.weight_stall_seconds) == (0.25, 0.125)
        assert (one.value, two.value) == (float(version), float(version))
        assert {(s.state, s.version) for s in ring.buffer.samplers()} == {("LIVE", version)}
    assert one.joins == (0 if ring.samplers[0]._receiver._group is None else 1), "the group is made once"
    assert ring.buffer.published_version() == 3


@every_backend
def test_a_snapshot_is_sent_as_it_was_taken_though_the_weights_change_meanwhile(ring: PublishingRing) -> None:
    sampler = ring.sampler("rollout-0")
    ring.publish(0)
    manifest, snapshot = ring.snapshot(1)
    ring.weights.value = 7.0
    assert ring.publisher.publish(manifest, snapshot).samplers_acknowledged == 1
    assert (sampler.version, sampler.value) == (1, 0.0)
    ring.weights.value = 0.0
    gathered = ring.publisher.publish(replace(manifest, policy_version=2, location=f"{manifest.location}-2"))
    assert gathered.weights_digest == weights_digest(ring.sender.copy.manifest)
    assert (sampler.version, sampler.value) == (2, 0.0)


@patient
def test_without_samplers_a_version_is_published_at_once(ring: PublishingRing) -> None:
    assert ring.publish(0).samplers_acknowledged == 0
    assert ring.publish(1).weight_stall_seconds is None
    assert ring.buffer.published_version() == 1


def test_an_unchanged_batch_changes_only_the_version_also_for_a_late_sampler(ring: PublishingRing) -> None:
    sampler = ring.sampler("rollout-0")
    first = ring.publish(0)
    second = ring.publish(1, changed=False)
    assert second.samplers_acknowledged == 1
    assert second.weights_digest == first.weights_digest
    late = ring.sampler("rollout-1")
    eventually(lambda: ring.registered("rollout-1").state == "LIVE")
    assert (sampler.version, sampler.value) == (late.version, late.value) == (1, 0.0)
    assert ring.publish(2).weights_digest != first.weights_digest
    assert sampler.value == late.value == 2.0


@every_backend
def test_a_late_sampler_is_caught_up_and_joins_later_broadcasts(ring: PublishingRing) -> None:
    first = ring.sampler("rollout-0")
    ring.publish(0)
    late = ring.sampler("rollout-1")
    eventually(lambda: ring.registered("rollout-1").state == "LIVE")
    assert (late.version, late.value) == (0, 0.0)
    assert first.updates == 1, "nobody else was bothered"
    assert ring.publish(1).samplers_acknowledged == 2
    assert (first.value, late.value) == (1.0, 1.0)
    assert late.updates == 2


def test_a_sampler_that_finds_no_copy_takes_part_in_the_version_that_replaces_it(ring: PublishingRing) -> None:
    ring.sampler("rollout-0")
    ring.publish(0)
    first = ring.snapshot(1)  # takes the memory of version 0
    late = ring.sampler("rollout-1")
    eventually(lambda: ring.sender._kept._wanted)
    ring.publisher._threads.close()  # no catch-up is under way
    assert late.joins == 0
    assert ring.publisher.publish(*first).samplers_acknowledged == 2
    ring.snapshot(2)
    assert ring.sender.copy.manifest.policy_version == 1, "it stays, because a sampler had found none"


def test_a_failing_sampler_is_excluded_and_rejoins(ring: PublishingRing, caplog: pytest.LogCaptureFixture) -> None:
    good, bad = ring.sampler("rollout-0"), ring.sampler("rollout-1")
    ring.publish(0)
    bad.fault = WeightTransferError("out of memory")
    ring.publish(1)
    eventually(lambda: ring.registered("rollout-0").state == "LIVE")
    assert ring.registered("rollout-1").state == "STALE"
    assert good.value == 1.0
    with caplog.at_level("INFO"):
        assert ring.publish(2).samplers_acknowledged == 1
    assert "version 2 reaches rollout-1 later" in caplog.text
    bad.fault = None
    eventually(lambda: ring.registered("rollout-1").state == "LIVE")
    assert bad.value == 2.0
    assert ring.publish(3).samplers_acknowledged == 2


def test_a_dead_sampler_costs_the_others_one_version_at_most(ring: PublishingRing) -> None:
    good, dead = ring.sampler("rollout-0"), ring.sampler("rollout-1")
    ring.publish(0)
    dead.stop()
    ring.samplers.remove(dead)
    dead._receiver._group.close()  # type: ignore[union-attr]  # as at the end of its process
    ring.publish(1)
    eventually(lambda: ring.registered("rollout-0").state == "LIVE")
    assert good.value == 1.0
    assert ring.registered("rollout-1").state == "STALE"
    assert ring.publish(2).samplers_acknowledged == 1
    assert good.value == 2.0


def beat(ring: PublishingRing, sampler: FakeSampler, seconds_ago: float) -> None:
    """Sets the time of a sampler's last heartbeat."""
    redis, key = ring.buffer.connection.redis, ring.buffer.connection.key("beats")
    redis.hset(key, sampler.id, int(1000 * (time.time() - seconds_ago)))


@pytest.mark.parametrize("hangs", [0, 1])
@pytest.mark.parametrize("ring", [{"deadline_seconds": 600.0}, {**DISK, "deadline_seconds": 600.0}], indirect=True)
def test_nobody_waits_for_a_sampler_that_hangs_and_the_others_go_on(
    ring: PublishingRing, hangs: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The one that hangs comes before or after the other one in the chain through which buckets are passed on."""
    monkeypatch.setattr(publisher, "_HEARTBEAT_SECONDS", 0.05)
    both = ring.sampler("rollout-0"), ring.sampler("rollout-1")
    good, hung = both[1 - hangs], both[hangs]
    beat(ring, good, -3600.0)
    ring.publisher = Publisher(ring.buffer, ring.sender, ring.recipe, ring.incarnation)
    ring.publish(0)
    hung.hold.clear()
    publishing = in_thread("publish", ring.publish, 1)
    eventually(lambda: any(link.busy for link in ring.publisher._links.values()))
    beat(ring, hung, 3600.0)
    assert publishing.result(20.0).samplers_acknowledged <= 1
    assert f"sampler {hung.id} did not take version 1: its heartbeat is silent" in caplog.text
    eventually(lambda: ring.registered(good.id).state == "LIVE" and good.value == 1.0)
    assert ring.registered(hung.id).state == "STALE" and ring.publisher.failed_updates >= 1
    assert ring.publish(2).samplers_acknowledged == 1, "a silent sampler takes no part"
    beat(ring, hung, -3600.0)
    hung.hold.set()
    eventually(lambda: ring.registered(hung.id).state == "LIVE")
    assert (good.value, hung.value) == (2.0, 2.0)


def test_a_restarted_sampler_is_not_mistaken_for_its_predecessor(ring: PublishingRing) -> None:
    sampler = ring.sampler("rollout-0")
    ring.publish(0)
    sampler.version, sampler.value = -1, float("nan")
    sampler.start()
    assert ring.registered("rollout-0").state == "JOINING"
    eventually(lambda: ring.registered("rollout-0").state == "LIVE")
    assert sampler.value == 0.0
    assert ring.publish(1).samplers_acknowledged == 1


@pytest.mark.parametrize("ring", [{"backend": "disk"}], indirect=True)
def test_a_sampler_may_restart_while_a_version_is_written(
    ring: PublishingRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = ring.sampler("rollout-0")
    ring.publish(0)
    links, send = ring.publisher._links, ring.sender.broadcast
    earlier, closed = links[sampler.id], threading.Event()
    monkeypatch.setattr(earlier, "close", closed.set)  # gRPC may crash the process if a closed channel is used

    def restarted_meanwhile(*arguments: Any) -> WeightManifest:
        sampler.start()
        eventually(lambda: links[sampler.id] is not earlier)
        assert not closed.is_set(), "the publication still uses it"
        return send(*arguments)

    monkeypatch.setattr(ring.sender, "broadcast", restarted_meanwhile)
    ring.publish(1)
    eventually(lambda: (ring.registered(sampler.id).state, sampler.value) == ("LIVE", 1.0))
    assert closed.is_set()


@patient
def test_a_broadcast_does_not_wait_for_a_sampler_that_is_catching_up(ring: PublishingRing) -> None:
    ring.publish(0)
    late = ring.sampler("rollout-0")
    late.hold.clear()
    eventually(lambda: late.joins == 1)
    assert ring.publish(1).samplers_acknowledged == 0
    late.hold.set()
    eventually(lambda: ring.registered("rollout-0").state == "LIVE")
    assert (late.version, late.value) == (1, 1.0), "version 0 came too late to be admitted with"


def test_a_replaced_trainer_publishes_nothing(ring: PublishingRing) -> None:
    sampler = ring.sampler("rollout-0")
    ring.publish(0)
    assert sampler.joined_incarnation == ring.incarnation, "a sampler refuses that of an earlier trainer"
    ring.buffer.begin_incarnation()
    with pytest.raises(FencedError):
        ring.publish(1)
    assert sampler.value == 0.0


def test_a_trainer_that_a_sampler_refuses_as_replaced_ends(ring: PublishingRing) -> None:
    sampler = ring.sampler("rollout-0")
    ring.publish(0)
    sampler.fault = FencedError("trainer incarnation 1 was replaced by 2")
    with pytest.raises(FencedError, match="sampler rollout-0: trainer incarnation 1 was replaced by 2"):
        ring.publish(1)
    assert ring.buffer.published_version() == 0


@differences
def test_differences_are_sent_once_all_samplers_hold_the_version_before(ring: PublishingRing) -> None:
    one, two = ring.sampler("rollout-0"), ring.sampler("rollout-1")
    first = ring.publish(0)
    assert first.weight_sent_bytes >= first.weight_bytes, "no sampler holds anything"
    second = ring.publish(1)
    assert second.samplers_acknowledged == 2
    assert 0 < second.weight_sent_bytes < second.weight_bytes / 2 and second.weight_encode_seconds > 0
    unchanged = ring.publish(2, changed=False)
    assert (unchanged.weight_sent_bytes, unchanged.weights_digest) == (0, second.weights_digest)
    assert ring.publish(3).weight_sent_bytes < first.weight_bytes / 2, "the base has a new number"
    assert (one.version, one.value, two.value) == (3, 3.0, 3.0)


@differences
def test_late_and_restarted_samplers_get_whole_weights_and_then_differences(ring: PublishingRing) -> None:
    first = ring.sampler("rollout-0")
    ring.publish(0)
    late = ring.sampler("rollout-1")
    eventually(lambda: ring.registered("rollout-1").state == "LIVE")
    assert late.value == 0.0
    assert ring.publish(1).weight_sent_bytes < 512
    first.restart(StagedReceiver(CPU, 0, None, frozenset()))
    eventually(lambda: ring.registered("rollout-0").state == "LIVE")
    assert ring.publish(2).weight_sent_bytes < 512
    assert (first.value, late.value) == (2.0, 2.0)


@differences
def test_a_sampler_that_lost_its_copy_refuses_the_difference_and_gets_whole_weights(
    ring: PublishingRing, caplog: pytest.LogCaptureFixture
) -> None:
    good, bad = ring.sampler("rollout-0"), ring.sampler("rollout-1")
    ring.publish(0)
    bad._receiver._held = None
    assert ring.publish(1).samplers_acknowledged == 1
    assert "a difference to version 0 of incarnation 1, and this sampler holds none" in caplog.text
    assert good.value == 1.0, "the others are not concerned"
    eventually(lambda: ring.registered("rollout-1").state == "LIVE")
    assert bad.value == 1.0
    assert ring.publish(2).samplers_acknowledged == 2
