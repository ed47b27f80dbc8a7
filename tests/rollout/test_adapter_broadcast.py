"""Adapters sent alone, without an engine: how the receiver merges them, where it gets the base, and failures."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tandem.protos.errors import DataError
from tandem.protos.manifest import DIGEST_FORMATS, decode_manifest, encode_manifest, weights_digest, with_base
from tandem.protos.types import WeightManifest
from tandem.protos.weight_group import empty_bucket, fill_bucket
from tandem.rollout.base_weights import checkpoint_shapes
from tandem.rollout.sampler import TransferProgress
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.services.trainer.publisher import Publisher
from tandem.trainer.weight_sender import WeightSender
from tests.support.adapter_policy import ALPHA, RANK, AdapterPolicy
from tests.support.memory_store import IN_MEMORY
from tests.support.publishing_ring import FakeSampler, PublishingRing
from tests.support.tiny_model import build_tiny_model
from tests.support.trainer_ring import make_recipe, make_run
from tests.support.waiting import eventually
from tests.support.weight_pair import Pair, error, wait

CPU = torch.device("cpu")
TIMEOUT = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden=64)


def make_sender(policy: AdapterPolicy, bucket_bytes: int = 4 << 10) -> WeightSender:
    return WeightSender(policy, bucket_bytes=bucket_bytes, adapters=policy.adapters, store=IN_MEMORY)


def make_receiver(folder: Path | None, expected: Path | None = None) -> StagedReceiver:
    known = expected or folder
    shapes = None if known is None else checkpoint_shapes(known)
    return StagedReceiver(CPU, 0, shapes, frozenset({"lm_head.weight"}), folder)


class AdapterPair(Pair):
    """A policy's sender and a receiver in one weight group."""

    def __init__(self, policy: AdapterPolicy, folder: Path | None, expected: Path | None = None) -> None:
        super().__init__(make_sender(policy), make_receiver(folder, expected))
        self.policy = policy
        self.version = -1
        self.join()

    def send_next(self) -> tuple[WeightManifest, TransferProgress]:
        self.version += 1
        return self.send(self.sender.manifest(1, self.version, "gloo"))

    def agrees(self) -> bool:
        """Whether the next version arrives bit for bit."""
        return self.send_next()[1]["error"] is None and carries(self.receiver, self.policy.merged())

    def lacks_base(self) -> bool:
        self.send_next()
        name, text = error(self.receiver)
        return name == "MissingBaseWeightsError" and "must be sent" in text

    def catch_up(self, *, brings_base: bool, sender: WeightSender | None = None) -> WeightManifest:
        """Sends the copy to the receiver, which then carries it bit for bit."""
        manifest = self.copy(sender, brings_base=brings_base)
        assert same(self.staged(), self.policy.merged())
        return manifest


def carries(receiver: StagedReceiver, expected: dict[str, torch.Tensor]) -> bool:
    """Whether the receiver has staged exactly these bits."""
    return same(dict(receiver.take()), expected)


def same(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return tensors.keys() == expected.keys() and all(tensors[name].equal(expected[name]) for name in expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("targets", ["all-linear", ("q_proj", "down_proj")], ids=["all", "some"])
def test_every_version_is_bit_identical_to_the_trainers_merged_weights(
    model: Path, dtype: str, targets: str | tuple[str, ...]
) -> None:
    policy = AdapterPolicy(model, dtype, target_modules=targets)
    pair = AdapterPair(policy, model)
    digests = set()
    for _ in range(6):
        sent, progress = pair.send_next()
        assert progress["error"] is None and tuple(progress["digests"]) == tuple(b.digest for b in sent.buckets)
        assert carries(pair.receiver, policy.merged())
        digests.add(weights_digest(sent))
        policy.step()
    assert len(digests) == 6
    with torch.no_grad():
        for matrix in policy.matrices:
            matrix.zero_()
    pair.send_next()
    assert carries(pair.receiver, policy.base()), "six versions left no trace"
    pair.sender.close()


def test_only_the_two_factors_of_each_adapted_matrix_are_sent(model: Path) -> None:
    policy = AdapterPolicy(model)
    manifest = make_sender(policy).manifest(1, 0, "gloo")
    adapted = {n: t for n, t in policy.base().items() if "_proj.weight" in n}
    sent = {tensor.name: tensor for bucket in manifest.buckets for tensor in bucket.tensors}
    assert sent.keys() == {name + end for name in adapted for end in (".lora_A", ".lora_B")}
    assert sum(tensor.num_bytes for tensor in sent.values()) == sum(4 * RANK * sum(t.shape) for t in adapted.values())
    assert manifest.adapters is not None
    assert (manifest.adapters.rank, manifest.adapters.scaling) == (RANK, ALPHA / RANK)
    assert all(bucket.digest for bucket in manifest.adapters.base)
    assert {tensor.name for bucket in manifest.adapters.base for tensor in bucket.tensors} == policy.base().keys()
    merged = WeightSender(policy, bucket_bytes=16 << 10).manifest(1, 0, "gloo")
    assert 7 * sum(b.num_bytes for b in manifest.buckets) < sum(b.num_bytes for b in merged.buckets)
    for each in (manifest, with_base(manifest)):
        assert decode_manifest(encode_manifest(each)) == each
    broken = encode_manifest(manifest).replace(b'"scaling"', b'"factor"')
    with pytest.raises(DataError):
        decode_manifest(broken)


def test_layers_with_transposed_weights_are_merged_correctly(tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2)).save_pretrained(tmp_path)
    policy = AdapterPolicy(tmp_path)
    policy.step()
    pair = AdapterPair(policy, tmp_path)
    assert pair.agrees()
    merged = dict(policy.model.named_parameters())
    for name, tensor in policy.merged().items():
        torch.testing.assert_close(tensor, merged[name], atol=1e-6, rtol=0)
    pair.sender.close()


@pytest.fixture
def other(model: Path, tmp_path: Path) -> Path:
    """A model of the same shapes with other weights."""
    return build_tiny_model(tmp_path / "other", hidden=64, seed=9)


@pytest.mark.parametrize("has", ["no folder", "another model", "a damaged file"])
def test_a_sampler_without_the_base_receives_it_once(model: Path, other: Path, tmp_path: Path, has: str) -> None:
    folder = None if has == "no folder" else other
    if has == "a damaged file":
        (other / "model.safetensors").write_bytes((model / "model.safetensors").read_bytes()[:-9])
    policy = AdapterPolicy(model)
    policy.step()
    pair = AdapterPair(policy, folder, model)
    assert pair.lacks_base()
    manifest = pair.catch_up(brings_base=True)
    assert len(manifest.buckets) > len(pair.sender.manifest(1, 0, "gloo").buckets)
    pair.join()
    for _ in range(2):
        policy.step()
        assert pair.agrees()
    # A restarted trainer recognizes the base by its digests.
    again = make_sender(policy)
    again.broadcast(again.manifest(2, 3, "gloo"), TIMEOUT)
    pair.catch_up(sender=again, brings_base=False)


@pytest.mark.parametrize("brings_base", [False, True])
def test_a_late_joiner_checks_the_digests_of_a_run_on_gpus(model: Path, brings_base: bool) -> None:
    policy = AdapterPolicy(model)
    policy.step()
    pair = AdapterPair(policy, None if brings_base else model, model)
    sender = pair.sender
    sender.close()
    assert sender.digest("xxh3").startswith("3:"), "the base had other digests before"
    sender.broadcast(sender.manifest(1, 0, "nccl"), TIMEOUT)  # to nobody
    assert pair.catch_up(brings_base=brings_base).digest_algorithm == "sums"


def test_a_base_has_the_digests_of_the_versions_algorithm(model: Path) -> None:
    sender = make_sender(AdapterPolicy(model))
    known = {name: sender.digest(name) for name in DIGEST_FORMATS}
    in_host_memory, in_gpu_memory = (sender.manifest(1, 0, backend) for backend in ("gloo", "nccl"))
    assert (in_host_memory.digest_algorithm, in_gpu_memory.digest_algorithm) == ("xxh3", "sums")
    assert in_host_memory.adapters != in_gpu_memory.adapters
    assert sender.manifest(1, 0, "gloo") == in_host_memory
    assert {name: sender.digest(name) for name in known} == known


def test_a_base_whose_file_changes_is_not_used_any_more(model: Path, tmp_path: Path) -> None:
    folder = build_tiny_model(tmp_path / "same", hidden=64)
    policy = AdapterPolicy(model)
    pair = AdapterPair(policy, folder)
    assert pair.agrees()
    file = folder / "model.safetensors"
    os.utime(file)
    policy.step()
    assert pair.agrees(), "touched, but the same"
    tensors = load_file(file)
    tensors["model.norm.weight"] += 1
    save_file(tensors, tmp_path / "changed")
    with open(file, "r+b") as opened:  # in place, under the memory map
        opened.write((tmp_path / "changed").read_bytes())
    assert pair.lacks_base()
    pair.catch_up(brings_base=True)
    pair.sender.close()


@pytest.mark.parametrize("brings_base", [False, True])
def test_a_sender_that_dies_half_way_does_not_change_the_base(model: Path, brings_base: bool) -> None:
    policy = AdapterPolicy(model)
    pair = AdapterPair(policy, None if brings_base else model)
    sender = pair.sender
    pair.send_next()
    pair.catch_up(brings_base=brings_base)
    policy.step()
    pair.join()
    manifest = sender.manifest(1, 1, "gloo")
    manifest = with_base(manifest) if brings_base else manifest
    pair.start(manifest)
    assert sender._group is not None and len(manifest.buckets) > 2
    gather = policy.adapters.gather_base if brings_base else policy.adapters.gather_factors
    for spec in manifest.buckets[:2]:
        buffer = empty_bucket(spec, CPU)
        with gather([tensor.name for tensor in spec.tensors]) as tensors:
            fill_bucket(spec, {name: tensor + 1 for name, tensor in tensors.items()}, buffer, "xxh3")
        sender._group.broadcast(buffer, TIMEOUT)
    sender.close()
    assert error(pair.receiver, 2.0)[0] == "WeightTransferError"
    pair.join()
    assert pair.agrees()
    sender.close()


def test_factors_that_fit_no_matrix_are_refused_before_the_transfer(model: Path) -> None:
    policy = AdapterPolicy(model)
    manifest, receiver = make_sender(policy, 1 << 20).manifest(1, 0, "gloo"), make_receiver(model)
    (bucket,) = manifest.buckets
    assert manifest.adapters is not None

    def refused(changed: WeightManifest) -> bool:
        receiver.start_receive(encode_manifest(changed), "any", TIMEOUT)
        return "fits no matrix" in str(wait(receiver)["error"])

    first = bucket.tensors[0]
    assert refused(replace(manifest, buckets=(replace(bucket, tensors=bucket.tensors[1:]),)))
    for wrong in (replace(first, name="model.norm.weight.lora_A"), replace(first, shape=(first.shape[1], RANK))):
        assert refused(replace(manifest, buckets=(replace(bucket, tensors=(wrong, *bucket.tensors[1:])),)))
    assert refused(replace(manifest, adapters=replace(manifest.adapters, rank=RANK + 1)))
    assert refused(replace(manifest, adapters=replace(manifest.adapters, base=manifest.adapters.base[1:])))
    assert not refused(manifest)


class Samplers(PublishingRing):
    """A ring with a trainer that broadcasts adapters."""

    def __init__(self, folder: Path, url: str, policy: AdapterPolicy, backend: str) -> None:
        recipe = make_recipe(folder, weights={"backend": backend, "deadline_seconds": 5.0})
        self.buffer = make_run(url, recipe)
        self.policy = policy
        self.sender = make_sender(policy)
        self.incarnation = self.buffer.begin_incarnation()
        self.publisher = Publisher(self.buffer, self.sender, recipe, self.incarnation)
        self.recipe = recipe
        self.samplers: list[FakeSampler] = []

    def based_sampler(self, sampler_id: str, folder: Path | None) -> FakeSampler:
        sampler = FakeSampler(self.buffer, sampler_id, IN_MEMORY, make_receiver(folder))
        self.samplers.append(sampler)
        return sampler

    def carries(self, sampler: FakeSampler) -> bool:
        return same(sampler.applied, self.policy.merged())


@pytest.mark.parametrize("backend", ["gloo", "disk"])
def test_samplers_with_and_without_the_base_join_early_late_and_again(
    model: Path, tmp_path: Path, redis_url: str, backend: str
) -> None:
    ring = Samplers(tmp_path, redis_url, AdapterPolicy(model), backend)
    try:
        with_it, without = ring.based_sampler("rollout-0", model), ring.based_sampler("rollout-1", None)
        first = ring.publisher.publish(*ring.snapshot(0))
        assert first.samplers_acknowledged == 1 and ring.carries(with_it)
        assert first.weight_bytes == sum(bucket.num_bytes for bucket in ring.sender.manifest(1, 0, "gloo").buckets)
        eventually(lambda: ring.registered("rollout-1").state == "LIVE")
        assert ring.carries(without), "it got the base beside the training"
        for version in (1, 2):
            ring.policy.step()
            assert ring.publisher.publish(*ring.snapshot(version)).samplers_acknowledged == 2
            assert ring.carries(with_it) and ring.carries(without)
        assert ring.publisher.publish(*ring.snapshot(3, changed=False)).weight_bytes == 0

        late = ring.based_sampler("rollout-2", model)
        eventually(lambda: ring.registered("rollout-2").state == "LIVE")
        assert ring.carries(late) and late.version == 3
        without.restart(make_receiver(None))
        assert ring.registered("rollout-1").state == "JOINING"
        eventually(lambda: ring.registered("rollout-1").state == "LIVE")
        assert ring.carries(without) and without.version == 3
        ring.policy.step()
        assert ring.publisher.publish(*ring.snapshot(4)).samplers_acknowledged == 3
        assert all(ring.carries(sampler) for sampler in ring.samplers)
        assert not (tmp_path / "run" / "weights" / "with-base").exists()
    finally:
        ring.close()
