"""Differences from `WeightSender` to `StagedReceiver` over gloo, the chain that passes buckets on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tandem.protos import weight_group
from tandem.protos.bucket_digest import DIGEST_BYTES
from tandem.protos.manifest import encode_manifest
from tandem.protos.types import WeightManifest
from tandem.protos.weight_group import WeightGroup
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.trainer.weight_sender import WeightSender
from tandem.trainer.weight_snapshot import WeightSnapshot
from tests.support.memory_store import IN_MEMORY
from tests.support.weight_pair import CPU, TIMEOUT, Pair, Tensors, connected, equal, error, wait


@pytest.fixture
def source() -> Tensors:
    return Tensors()


@pytest.fixture
def pair(source: Tensors) -> Iterator[Pair]:
    sender = WeightSender(source, bucket_bytes=400, store=IN_MEMORY, encoding="delta")
    pair = Pair(sender, StagedReceiver(CPU, 0, source.shapes(), frozenset()))
    pair.join()
    yield pair
    pair.sender.close()


def next_version(pair: Pair, version: int) -> tuple[WeightManifest, WeightSnapshot]:
    """A version that is sent as the difference to the one before, if there is one."""
    manifest = pair.sender.manifest(1, version, "gloo")
    snapshot = pair.sender.snapshot(manifest)
    return replace(manifest, base=snapshot.base), snapshot


def test_differences_give_the_weights_bit_for_bit(source: Tensors, pair: Pair) -> None:
    pair.send(*next_version(pair, 0))
    assert equal(pair.staged(), source)
    whole_bytes = pair.sender.sent_bytes
    for version in range(1, 4):
        source.tensors["head"][version] = float("nan")
        sent, progress = pair.send(*next_version(pair, version))
        assert list(progress["digests"]) == [bucket.digest for bucket in sent.buckets]
        staged = pair.staged()
        assert all(
            staged[name].view(-1).view(torch.uint8).equal(tensor.view(-1).view(torch.uint8))
            for name, tensor in source.tensors.items()
        )
        assert pair.sender.sent_bytes < whole_bytes / 4
        for tensor in staged.values():
            tensor.zero_()  # a model may write to what it loads


def test_a_version_that_changed_everywhere_is_sent_whole(source: Tensors, pair: Pair) -> None:
    pair.send(*next_version(pair, 0))
    whole_bytes = pair.sender.sent_bytes
    source.tensors = Tensors(seed=5).tensors
    pair.send(*next_version(pair, 1))
    assert pair.sender.sent_bytes > 0.8 * whole_bytes
    assert equal(pair.staged(), source)


def test_the_base_keeps_its_bits_under_the_number_of_an_unchanged_version(source: Tensors, pair: Pair) -> None:
    pair.send(*next_version(pair, 0))
    pair.send(pair.sender.manifest(1, 1, "gloo", changed=False))
    source.tensors["embed"][0] += 1
    manifest, snapshot = next_version(pair, 2)
    assert manifest.base == (1, 1)
    pair.send(manifest, snapshot)
    assert equal(pair.staged(), source)


def test_a_difference_to_another_version_is_refused_and_both_are_named(source: Tensors, pair: Pair) -> None:
    pair.send(*next_version(pair, 0))
    other = StagedReceiver(CPU, 0, None, frozenset())
    pair.group = connected(pair.sender, [pair.receiver, other])
    source.tensors["embed"][0] += 1
    manifest, snapshot = next_version(pair, 1)
    other.start_receive(b"", "", TIMEOUT)  # leaves no copy
    wait(other)
    for receiver in (pair.receiver, other):
        receiver.start_receive(encode_manifest(manifest), pair.group, TIMEOUT)
    pair.sender.broadcast(manifest, TIMEOUT, snapshot)
    assert error(other) == (
        "MissingVersionError",
        "version 1 arrived as a difference to version 0 of incarnation 1, and this sampler holds none; "
        "it must get the whole weights",
    )
    assert equal(pair.staged(), source), "the refusal of one does not concern the other"

    assert pair.receiver._held is not None
    pair.receiver._held = pair.receiver._held._replace(version=(1, 7))
    pair.group = connected(pair.sender, [pair.receiver])
    source.tensors["embed"][0] += 1
    pair.send(*next_version(pair, 2))
    assert "to version 1 of incarnation 1, and this sampler holds version 7 of" in error(pair.receiver)[1]
    pair.copy()
    assert equal(pair.staged(), source), "a late joiner's copy is whole"
    pair.join()
    source.tensors["embed"][0] += 1
    pair.send(*next_version(pair, 3))
    assert equal(pair.staged(), source)


def test_a_damaged_difference_is_refused_and_whole_weights_follow(
    source: Tensors, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.send(*next_version(pair, 0))
    source.tensors["embed"][0] += 1
    sent = WeightGroup.broadcast

    def damaged(group: WeightGroup, buffer: torch.Tensor, *arguments: object) -> None:
        if group is pair.sender._group and len(buffer) > DIGEST_BYTES:
            buffer = buffer.clone()
            buffer[-1] ^= 1  # of the digest
        sent(group, buffer, *arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(WeightGroup, "broadcast", damaged)
        pair.send(*next_version(pair, 1))
        assert "nothing was applied" in error(pair.receiver)[1]
    source.tensors["embed"][0] += 1
    pair.send(*next_version(pair, 2))
    assert error(pair.receiver)[0] == "MissingVersionError", "its copy is not trusted any more"
    pair.copy()
    assert equal(pair.staged(), source)


@pytest.mark.parametrize("num_receivers", [1, 2, 5])
def test_a_chain_delivers_large_and_small_buckets_to_every_rank(num_receivers: int) -> None:
    source = Tensors()
    part = weight_group._PART_BYTES // 4
    for size in (2 * part + 70_000, part, part - 4):  # in the last one, a part ends inside the digest
        source.tensors[f"large-{size}"] = torch.arange(size, dtype=torch.float32)
    sender = WeightSender(source, bucket_bytes=400, store=IN_MEMORY)
    receivers = [StagedReceiver(CPU, 0, None, frozenset()) for _ in range(num_receivers)]
    group = connected(sender, receivers)
    for version in range(2):
        manifest = sender.manifest(1, version, "gloo")
        for receiver in receivers:
            receiver.start_receive(encode_manifest(manifest), group, TIMEOUT)
        sender.broadcast(manifest, TIMEOUT)
        for receiver in receivers:
            assert wait(receiver)["error"] is None
            assert equal(receiver.take(), source)
        source.tensors[f"large-{part}"] += 1
    sender.close()
