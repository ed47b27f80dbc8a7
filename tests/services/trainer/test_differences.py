"""A whole trainer that sends differences to a sampler, which receives with the real receiver."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tandem.services.buffer.store_source import redis_store
from tandem.trainer import weight_snapshot
from tests.support.publishing_ring import FakeSampler
from tests.support.trainer_ring import P, different_rewards, lines_of, make_recipe, make_run, put_scored, train


@pytest.mark.parametrize("zero_stage", ["auto", 3], ids=["copied in a thread", "copied in the loop"])
def test_a_sampler_that_gets_differences_has_the_exported_weights(
    tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, zero_stage: str | int
) -> None:
    recipe = make_recipe(tmp_path, weights={"encoding": "delta"}, trainer={"zero_stage": zero_stage})
    buffer = make_run(redis_url, recipe)
    put_scored(buffer, different_rewards(4 * P))
    encode, encoders = weight_snapshot.encode_delta, set()

    def noted(*arguments: object) -> object:
        encoders.add(threading.current_thread().name.partition("_")[0])
        return encode(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_snapshot, "encode_delta", noted)
    sampler = FakeSampler(buffer, "rollout-0", redis_store(redis_url, recipe.run.run_id, "weights"))
    try:
        assert train(recipe, redis_url)
    finally:
        sampler.stop()
    exported = load_file(recipe.folder / "hf" / "model.safetensors")
    assert sampler.version == 4
    assert sampler.applied.keys() == exported.keys()
    assert all(sampler.applied[name].equal(tensor) for name, tensor in exported.items())
    assert encoders == {"encode"}, "buckets are encoded while others are copied"
    for line in lines_of(recipe):
        assert 0 < line["weight_sent_bytes"] < line["weight_bytes"]
        assert line["weight_encode_seconds"] > 0
