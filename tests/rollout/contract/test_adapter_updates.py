"""Adapters sent alone to a running engine: parity with transformers and with merged weights, versions, joiners and
failures.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tandem.protos.errors import MissingBaseWeightsError, WeightTransferError
from tandem.protos.weight_group import empty_bucket, fill_bucket
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments
from tandem.trainer.weight_sender import WeightSender
from tests.support.adapter_policy import AdapterPolicy
from tests.support.engine_process import EngineProcess, without_end
from tests.support.tiny_model import build_tiny_model
from tests.support.weight_ring import SHORT, TIMEOUT, AdapterRing


@pytest.fixture(scope="module", params=["found", "sent"])
def ring(
    request: pytest.FixtureRequest, engine_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[AdapterRing]:
    """An engine that has the base in its model folder, and one whose folder holds other weights; with a tied and an
    untied head.
    """
    torch.set_num_threads(1)
    found = request.param == "found"
    folder = tmp_path_factory.mktemp("model")
    base = without_end(build_tiny_model(folder / "base", tied=found, hidden=64))
    loaded = base if found else without_end(build_tiny_model(folder / "other", tied=False, hidden=64, seed=9))
    config = RolloutConfig(engine=engine_name, kv_cache_bytes=64 << 20, max_groups_in_flight=8, samples_per_prompt=4)
    with EngineProcess(SamplerArguments(config, str(loaded), "float32", max_model_tokens=512, seed=3)) as engine:
        ring = AdapterRing(engine, AdapterPolicy(base))
        ring.join()
        if found:
            ring.update()
        else:
            with pytest.raises(MissingBaseWeightsError, match="must be sent"):
                ring.update()
            assert ring.engine.call("policy_version") == -1
            ring.catch_up(brings_base=True)
            ring.join()
        yield ring


def test_versions_agree_with_transformers_and_with_merged_weights(ring: AdapterRing) -> None:
    assert ring.agrees()
    for _ in range(5):
        ring.update()
        assert ring.agrees()
    alone = ring.sample(range(5, 25), 4, SHORT, key="same").result(60)
    whole = WeightSender(ring.policy, bucket_bytes=64 << 10)
    whole.broadcast(whole.manifest(1, ring.version, "gloo"), TIMEOUT)
    offer = whole.start_copy("127.0.0.1", 1, TIMEOUT)
    ring.engine.submit("join_weight_group", offer.address, 1, TIMEOUT).result(TIMEOUT)
    ring.engine.submit("update_weights", offer.manifest, offer.address.group_name, TIMEOUT).result(TIMEOUT)
    merged = ring.sample(range(5, 25), 4, SHORT, key="same").result(60)
    for one, other in zip(alone, merged, strict=True):
        assert np.array_equal(one.segments[0].ids, other.segments[0].ids)
        assert np.array_equal(one.segments[0].behavior_logprobs, other.segments[0].behavior_logprobs), "bit for bit"
    ring.join()
    ring.update()
    assert ring.agrees(), "merged versions in between do no harm"


def test_zero_adapters_restore_the_base_weights(ring: AdapterRing) -> None:
    ring.update()
    for matrix in ring.policy.matrices:
        matrix.data.zero_()
    ring.policy.step = lambda: None
    try:
        ring.update()
        assert ring.agrees()
    finally:
        del ring.policy.step
    base = ring.policy.base()
    assert all(tensor.equal(base[name]) for name, tensor in ring.models[ring.version].named_parameters())


def test_long_answers_carry_the_versions_that_sampled_them(ring: AdapterRing) -> None:
    running = [ring.sample(range(5, 15 + number), 2, key=f"0-{number}") for number in range(3)]
    reports = []
    while not all(future.done() for future in running):
        reports.append(ring.update())
    for row in (row for future in running for row in future.result(60)):
        assert len(row.segments[0].spans) >= 2
        assert ring.errors(row).max() <= 1e-3 and ring.errors(row).mean() <= 1e-5


def test_a_failed_update_keeps_the_weights_and_a_joiner_catches_up(ring: AdapterRing, tmp_path: Path) -> None:
    ring.update()
    manifest = ring.sender.manifest(1, ring.version + 1, "gloo")
    assert len(manifest.buckets) > 2
    for damaged in (False, True):  # first the sender dies half way; then all buckets arrive, one of them damaged
        answer = ring.engine.submit("update_weights", manifest, ring.group_name, TIMEOUT)
        assert ring.sender._group is not None
        for number, spec in enumerate(manifest.buckets if damaged else manifest.buckets[:2]):
            buffer = empty_bucket(spec, torch.device("cpu"))
            with ring.policy.adapters.gather_factors([tensor.name for tensor in spec.tensors]) as tensors:
                fill_bucket(spec, {name: tensor + 1 for name, tensor in tensors.items()}, buffer)
            buffer[0] ^= number == 1
            ring.sender._group.broadcast(buffer, TIMEOUT)
        if not damaged:
            ring.sender.close()
        with pytest.raises(WeightTransferError):
            answer.result(TIMEOUT)
        assert ring.engine.call("policy_version") == ring.version and ring.agrees()
        ring.join()
    ring.update("disk", str(tmp_path / "000001"))
    assert ring.agrees()
    for brings_base in (True, False):
        ring.catch_up(brings_base=brings_base)
        assert ring.agrees()
    ring.join()
    ring.update()
    assert ring.agrees()
