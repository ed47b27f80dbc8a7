"""Rank 0 holds the weights once beside those that it trains: a snapshot takes the memory of the version before it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tandem.protos.errors import WeightTransferError
from tandem.protos.manifest import encode_manifest
from tandem.protos.types import BucketSpec, WeightManifest
from tandem.protos.weight_group import empty_bucket
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.trainer import weight_sender, weight_snapshot
from tandem.trainer.weight_sender import CopyTransfer, WeightSender
from tandem.trainer.weight_snapshot import WeightSnapshot
from tests.support.memory_store import IN_MEMORY
from tests.support.waiting import eventually
from tests.support.weight_pair import CPU, TIMEOUT, Tensors, connected, equal, wait


@pytest.fixture
def source() -> Tensors:
    return Tensors()


@pytest.fixture
def sender(source: Tensors) -> Iterator[WeightSender]:
    sender = WeightSender(source, bucket_bytes=400, store=IN_MEMORY)
    yield sender
    sender.close()


def publish(sender: WeightSender, version: int) -> set[int]:
    """Publishes a version from a snapshot and returns the addresses of its buckets."""
    manifest = sender.manifest(1, version, "gloo")
    snapshot = sender.snapshot(manifest)
    sender.broadcast(manifest, TIMEOUT, snapshot)
    return addresses(snapshot)


def addresses(snapshot: WeightSnapshot) -> set[int]:
    return {buffer.data_ptr() for _, buffer in snapshot.buckets}


def received(offer: CopyTransfer, source: Tensors) -> dict[str, torch.Tensor]:
    """What a late joiner receives that takes the offer."""
    receiver = StagedReceiver(CPU, 0, source.shapes(), frozenset())
    receiver.start_join(asdict(offer.address), 1, IN_MEMORY, TIMEOUT)
    assert wait(receiver)["error"] is None
    receiver.start_receive(encode_manifest(offer.manifest), offer.address.group_name, TIMEOUT)
    assert wait(receiver)["error"] is None
    return dict(receiver.take())


def test_a_snapshot_takes_the_memory_of_the_version_before(source: Tensors, sender: WeightSender) -> None:
    first = publish(sender, 0)
    source.tensors["head"] += 1
    assert publish(sender, 1) == first
    assert equal(received(sender.start_copy("127.0.0.1", 1, TIMEOUT), source), source)


def test_a_version_that_is_sent_as_it_is_gathered_takes_the_memory_of_the_version_before(
    source: Tensors, sender: WeightSender
) -> None:
    first = publish(sender, 0)
    source.tensors["head"] += 1
    sender.broadcast(sender.manifest(1, 1, "gloo"), TIMEOUT)
    assert {buffer.data_ptr() for buffer in sender.copy.buffers} == first
    assert equal(received(sender.start_copy("127.0.0.1", 1, TIMEOUT), source), source)


def test_there_is_no_copy_for_late_joiners_while_a_version_replaces_it(sender: WeightSender) -> None:
    publish(sender, 0)
    manifest = sender.manifest(1, 1, "gloo")
    snapshot = sender.snapshot(manifest)
    with pytest.raises(WeightTransferError, match="a new version is being copied and sent"):
        sender.start_copy("127.0.0.1", 1, TIMEOUT)
    sender.broadcast(manifest, TIMEOUT, snapshot)
    sender.snapshot(sender.manifest(1, 2, "gloo"))
    assert sender.copy.manifest.policy_version == 1, "it stays for whoever asked in vain"
    sender.snapshot(sender.manifest(1, 3, "gloo", changed=False))
    assert sender.copy.manifest.policy_version == 1, "equal weights need no copy"


def test_a_copy_that_a_late_joiner_reads_keeps_its_memory(source: Tensors, sender: WeightSender) -> None:
    first = publish(sender, 0)
    before = Tensors()
    offer = sender.start_copy("127.0.0.1", 1, TIMEOUT)
    source.tensors["head"] += 1
    assert not publish(sender, 1) & first
    assert equal(received(offer, source), before)
    second = {buffer.data_ptr() for buffer in sender.copy.buffers}
    assert publish(sender, 2) == second, "whoever reads an older version does not keep this one's memory"
    eventually(lambda: not sender._kept._lent)


@pytest.fixture
def encoder(source: Tensors) -> Iterator[WeightSender]:
    sender = WeightSender(source, bucket_bytes=8, store=IN_MEMORY, encoding="delta")  # a bucket for each tensor
    yield sender
    sender.close()


def joined(encoder: WeightSender, source: Tensors) -> tuple[StagedReceiver, str]:
    """A receiver in a group with the sender, and the group's name."""
    receiver = StagedReceiver(CPU, 0, source.shapes(), frozenset())
    return receiver, connected(encoder, [receiver])


def send(
    encoder: WeightSender, snapshot: WeightSnapshot, manifest: WeightManifest, receiver: StagedReceiver, group: str
) -> dict[str, torch.Tensor]:
    """Sends a snapshot as differences, if it has any, and returns what arrives."""
    manifest = replace(manifest, base=snapshot.base)
    receiver.start_receive(encode_manifest(manifest), group, TIMEOUT)
    encoder.broadcast(manifest, TIMEOUT, snapshot)
    assert wait(receiver)["error"] is None
    return dict(receiver.take())


def with_first_version(encoder: WeightSender, source: Tensors) -> tuple[StagedReceiver, str, WeightSnapshot]:
    """A receiver that has a first version, its group, and that version's snapshot."""
    receiver, group = joined(encoder, source)
    manifest = encoder.manifest(1, 0, "gloo")
    first = encoder.snapshot(manifest)
    send(encoder, first, manifest, receiver, group)
    return receiver, group, first


def test_differences_take_the_memory_of_the_version_that_they_are_to_and_three_buckets_more(
    source: Tensors, encoder: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, group, first = with_first_version(encoder, source)
    assert (first.base, list(first.differences)) == (None, [])

    taken: list[BucketSpec] = []

    def noted(spec: BucketSpec, device: torch.device) -> torch.Tensor:
        taken.append(spec)
        return empty_bucket(spec, device)

    for module in (weight_sender, weight_snapshot):
        monkeypatch.setattr(module, "empty_bucket", noted)
    source.tensors["head"][3] += 1
    manifest = encoder.manifest(1, 1, "gloo")
    second = encoder.snapshot(manifest)
    assert len(manifest.buckets) > 3, "buckets are overwritten"
    assert [spec.num_bytes for spec in taken] == [max(spec.num_bytes for spec in manifest.buckets)] * 3
    assert second.base == (1, 0)
    assert addresses(second) == addresses(first)
    assert equal(send(encoder, second, manifest, receiver, group), source)
    assert equal(received(encoder.start_copy("127.0.0.1", 1, TIMEOUT), source), source)


def test_differences_to_a_copy_that_a_late_joiner_reads_leave_it_as_it_is(
    source: Tensors, encoder: WeightSender
) -> None:
    receiver, group, first = with_first_version(encoder, source)
    before = Tensors()
    offer = encoder.start_copy("127.0.0.1", 1, TIMEOUT)
    source.tensors["head"][3] += 1
    manifest = encoder.manifest(1, 1, "gloo")
    second = encoder.snapshot(manifest)
    assert second.base == (1, 0)
    assert not addresses(second) & addresses(first)
    assert equal(send(encoder, second, manifest, receiver, group), source)
    assert equal(received(offer, source), before)


def test_a_bucket_is_overwritten_only_once_its_difference_is_encoded(
    source: Tensors, encoder: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver, group, _ = with_first_version(encoder, source)
    for tensor in source.tensors.values():
        tensor += 1
    encode, may_encode, begun = weight_snapshot.encode_delta, threading.Semaphore(0), []

    def blocked(*arguments: Any) -> Any:
        begun.append(arguments)
        assert may_encode.acquire(timeout=TIMEOUT)
        return encode(*arguments)

    monkeypatch.setattr(weight_snapshot, "encode_delta", blocked)
    gathered: list[int] = []
    gather = source.gather
    monkeypatch.setattr(encoder, "_gather", lambda names: gathered.append(len(names)) or gather(names))
    manifest = encoder.manifest(1, 1, "gloo")
    with ThreadPoolExecutor(1) as loop:
        running = loop.submit(encoder.begin_snapshot, manifest)
        eventually(lambda: len(gathered) == 3 and len(begun) == 2)
        assert not wait_for([running], 0.2).done, "the loop waits for memory of a bucket"
        may_encode.release(len(manifest.buckets))
        take_snapshot = running.result(TIMEOUT)
    sent = {name: tensor.clone() for name, tensor in source.tensors.items()}
    source.tensors["head"] += 1  # the weights may change once all buckets are copied
    snapshot = take_snapshot()
    arrived = send(encoder, snapshot, manifest, receiver, group)
    assert snapshot.base == (1, 0) and all(arrived[name].equal(tensor) for name, tensor in sent.items())


def test_an_encoder_that_fails_is_an_error_of_the_snapshot(
    source: Tensors, encoder: WeightSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_first_version(encoder, source)

    def fails(*_: object) -> None:
        raise MemoryError("no memory")

    monkeypatch.setattr(weight_snapshot, "encode_delta", fails)
    with pytest.raises(MemoryError, match="no memory"):
        encoder.snapshot(encoder.manifest(1, 1, "gloo"))
