"""Weight updates of a running engine: versions, parity with transformers, failures, and how long the engine pauses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tandem.protos.errors import WeightTransferError
from tandem.protos.types import SamplingParameters, Trajectory
from tandem.protos.weight_group import empty_bucket, fill_bucket
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments
from tests.support.engine_process import EngineProcess, without_end
from tests.support.tiny_model import build_tiny_model
from tests.support.weight_ring import LONG, TIMEOUT, Policy, Ring, spanned_errors


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def ring(request: pytest.FixtureRequest, engine_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    torch.set_num_threads(1)
    folder = without_end(build_tiny_model(tmp_path_factory.mktemp("model"), tied=request.param, hidden=64, layers=2))
    config = RolloutConfig(engine=engine_name, kv_cache_bytes=64 << 20, max_groups_in_flight=8, samples_per_prompt=4)
    with EngineProcess(SamplerArguments(config, str(folder), "float32", max_model_tokens=512, seed=3)) as engine:
        ring = Ring(engine, Policy(folder), bucket_bytes=64 << 10)
        ring.join()
        ring.update()
        yield ring


def test_requests_started_after_an_update_agree_with_transformers(ring: Ring) -> None:
    for temperature in (1.0, 0.7):
        ring.update()
        rows = ring.sample(range(5, 25), 4, SamplingParameters(temperature=temperature, max_tokens=120)).result(60)
        for row in rows:
            assert [s.policy_version for s in row.segments[0].spans] == [ring.version]
            assert row.segments[0].spans[0].first_token == 20 and row.segments[0].spans[0].incarnation == 1
            assert ring.errors(row).mean() <= 1e-5


def test_every_token_of_long_answers_carries_the_version_that_sampled_it(ring: Ring) -> None:
    running = [ring.sample(range(5, 15 + number), 4, key=f"0-{number}") for number in range(4)]
    reports = []
    while not all(future.done() for future in running):
        if len(reports) < 8:  # limits slow engines, because each update is checked twice below
            reports.append(ring.update())
        time.sleep(0.1)
    rows = [row for future in running for row in future.result(60)]
    assert len(reports) >= 3 and all(len(row.segments[0].spans) >= 2 for row in rows)
    assert all(report.stall_seconds > 0 for report in reports)  # benchmarks/startup.py measures how long
    for row in rows:
        assert row.segments[0].num_loss_tokens == LONG.max_tokens
        assert ring.errors(row).max() <= 1e-3 and ring.errors(row).mean() <= 1e-5
    # A version boundary shifted by one token shows at that token.
    for row in rows[:4]:
        spans = [(span.first_token, span.policy_version) for span in row.segments[0].spans]
        for number in range(1, len(spans)):
            for move in (-1, 1):
                moved = [(first + move * (n == number), version) for n, (first, version) in enumerate(spans)]
                assert spanned_errors(ring.models, row, moved).max() > 1e-3


def test_greedy_answers_are_correct_across_a_version_change(ring: Ring) -> None:
    running = ring.sample(range(30, 40), 2, SamplingParameters(temperature=0.0, max_tokens=300))
    while not running.done():
        ring.update()
        time.sleep(0.15)
    first, second = running.result(60)
    assert len(first.segments[0].spans) >= 2
    for row in (first, second):
        scaled = Trajectory(0, "policy", row.segments, "length", "", SamplingParameters(temperature=1.0))
        assert ring.errors(scaled).mean() <= 1e-5


def test_the_prefix_cache_is_not_shared_across_versions(ring: Ring) -> None:
    prompt = [5 + number % 90 for number in range(300)]  # more than two cache blocks
    short = SamplingParameters(max_tokens=8)
    for _ in range(2):
        for _ in range(2):  # the second request finds the version's own blocks in the cache
            for row in ring.sample(prompt, 2, short).result(60):
                assert ring.errors(row).mean() <= 1e-5
        ring.update()
    waiting = ring.sample(prompt, 4, short)  # may run with either version; its stamp must match
    ring.update()
    for row in waiting.result(60):
        if len(row.segments[0].spans) == 1:
            assert ring.errors(row).mean() <= 1e-5


def test_a_sender_that_dies_half_way_keeps_the_weights(ring: Ring) -> None:
    running = ring.sample(range(5, 15), 4)
    manifest = ring.sender.manifest(1, ring.version + 1, "gloo")
    answer = ring.engine.submit("update_weights", manifest, ring.group_name, TIMEOUT)
    group = ring.sender._group
    assert group is not None and len(manifest.buckets) > 3
    for spec in manifest.buckets[:2]:
        buffer = empty_bucket(spec, torch.device("cpu"))
        with ring.policy.gather([tensor.name for tensor in spec.tensors]) as tensors:
            fill_bucket(spec, tensors, buffer)
        group.broadcast(buffer, TIMEOUT)
    started = time.monotonic()
    ring.sender.close()
    with pytest.raises(WeightTransferError):
        answer.result(TIMEOUT)
    assert time.monotonic() - started < TIMEOUT / 2
    ring.join()
    for row in running.result(60):
        assert [span.policy_version for span in row.segments[0].spans] == [ring.version]
        assert ring.errors(row).mean() <= 1e-5
    ring.update()


def test_a_damaged_bucket_is_refused_and_the_next_update_works(ring: Ring) -> None:
    manifest = ring.sender.manifest(1, ring.version + 1, "gloo")
    answer = ring.engine.submit("update_weights", manifest, ring.group_name, TIMEOUT)
    assert ring.sender._group is not None
    for spec in manifest.buckets:
        buffer = empty_bucket(spec, torch.device("cpu"))
        with ring.policy.gather([tensor.name for tensor in spec.tensors]) as tensors:
            fill_bucket(spec, tensors, buffer)
        buffer[0] ^= 1
        ring.sender._group.broadcast(buffer, TIMEOUT)
    with pytest.raises(WeightTransferError, match="nothing was applied"):
        answer.result(TIMEOUT)
    assert ring.engine.call("policy_version") == ring.version
    ring.update()
    assert all(ring.errors(row).mean() <= 1e-5 for row in ring.sample(range(5, 9), 2).result(60))


def test_disk_a_private_copy_and_an_unchanged_version_give_the_same_weights(ring: Ring, tmp_path: Path) -> None:
    ring.update("disk", str(tmp_path / "weights"))
    assert all(ring.errors(row).mean() <= 1e-5 for row in ring.sample(range(5, 9), 2).result(60))

    offer = ring.sender.start_copy("127.0.0.1", 1, TIMEOUT)
    ring.engine.submit("join_weight_group", offer.address, 1, TIMEOUT).result(TIMEOUT)
    report = ring.engine.submit("update_weights", offer.manifest, offer.address.group_name, TIMEOUT).result(TIMEOUT)
    offer.finished.result(TIMEOUT)
    assert report.digests == tuple(bucket.digest for bucket in offer.manifest.buckets)

    unchanged = ring.sender.manifest(1, ring.version + 1, "gloo", changed=False)
    ring.engine.submit("update_weights", unchanged, "", TIMEOUT).result(TIMEOUT)
    ring.version += 1
    ring.models[ring.version] = ring.models[ring.version - 1]
    assert all(ring.errors(row).mean() <= 1e-5 for row in ring.sample(range(5, 9), 2).result(60))
    ring.join()
    ring.update()
