"""Buckets, digests, and all transfers from `WeightSender` to `StagedReceiver` that need no GPU, without an engine.
tests/protos/test_weight_gpus.py tests the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError

from tandem.protos.errors import DataError, EnvironmentLackError, SchemaVersionError, WeightTransferError
from tandem.protos.manifest import (
    ALIGNMENT,
    ParameterSpec,
    decode_manifest,
    encode_manifest,
    plan_buckets,
    weights_digest,
)
from tandem.protos.types import WeightManifest
from tandem.protos.weight_group import (
    DIGEST_BYTES,
    WeightGroup,
    WeightGroupStore,
    bucket_digest,
    bucket_tensors,
    check_bucket,
    empty_bucket,
    fill_bucket,
)
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.trainer import weight_sender
from tandem.trainer.weight_sender import WeightSender

CPU = torch.device("cpu")
TIMEOUT = 10.0


class Tensors:
    """A source of weights on one rank, like a learner."""

    rank = 0

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.tensors = {
            "embed": torch.randn(37, 5, generator=generator),
            "norm": torch.randn(5, generator=generator).to(torch.bfloat16),
            "scalar": torch.randn((), generator=generator),
            "head": torch.randn(300, 17, generator=generator).to(torch.bfloat16),
        }

    def parameter_specs(self) -> list[ParameterSpec]:
        return [(name, str(each.dtype).removeprefix("torch."), each.shape) for name, each in self.tensors.items()]

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        yield {name: self.tensors[name] for name in names}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def wait(receiver: StagedReceiver, seconds: float = TIMEOUT) -> dict[str, Any]:
    deadline = time.monotonic() + seconds
    while not receiver.progress()["done"]:
        assert time.monotonic() < deadline, "the receiver's own deadline must come first"
        time.sleep(0.005)
    return receiver.progress()


def equal(received: list[tuple[str, torch.Tensor]], source: Tensors) -> bool:
    return {name for name, _ in received} == source.tensors.keys() and all(
        torch.equal(tensor, source.tensors[name]) for name, tensor in received
    )


def connected(sender: WeightSender, receivers: Sequence[StagedReceiver]) -> str:
    address = sender.prepare("127.0.0.1", 1 + len(receivers), "gloo", TIMEOUT)
    for number, receiver in enumerate(receivers):
        receiver.start_join(asdict(address), 1 + number, TIMEOUT)
    sender.connect(TIMEOUT)
    for receiver in receivers:
        assert wait(receiver)["error"] is None
    return address.group_name


@pytest.fixture
def source() -> Tensors:
    return Tensors()


@pytest.fixture
def receiver(source: Tensors) -> StagedReceiver:
    return StagedReceiver(CPU, 0, source.shapes(), frozenset())


SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
SPECS = st.lists(st.tuples(st.sampled_from(["float32", "bfloat16", "int8"]), SHAPES), max_size=12)


@given(SPECS, st.integers(1, 400))
def test_a_plan_keeps_every_tensor_once_in_order_and_within_its_bucket(
    specs: list[tuple[str, tuple[int, ...]]], size: int
) -> None:
    named = [(f"p{number}", dtype, shape) for number, (dtype, shape) in enumerate(specs)]
    buckets = plan_buckets(named, size)
    assert [(t.name, t.dtype, t.shape) for b in buckets for t in b.tensors] == named
    for bucket in buckets:
        end = 0
        for tensor in bucket.tensors:
            assert end <= tensor.offset < end + ALIGNMENT and tensor.offset % ALIGNMENT == 0
            end = tensor.offset + tensor.num_bytes
        assert end <= bucket.num_bytes < end + ALIGNMENT
        assert len(bucket.tensors) == 1 or end <= size
    manifest = WeightManifest(2, 7, "gloo", buckets, "somewhere")
    assert decode_manifest(encode_manifest(manifest)) == manifest


def test_inconsistent_manifests_are_refused(source: Tensors) -> None:
    manifest = WeightSender(source, bucket_bytes=400).manifest(1, 3, "gloo")
    data = encode_manifest(manifest)
    with pytest.raises(SchemaVersionError, match="99"):
        decode_manifest(data.replace(b'"schema_version":2', b'"schema_version":99'))
    with pytest.raises(DataError, match="does not fit"):
        decode_manifest(data.replace(b'"offset":0', b'"offset":4096'))
    for broken in (b"", b"[]", b"{}", data[:-3], data.replace(b'"dtype"', b'"kind"')):
        with pytest.raises(DataError):
            decode_manifest(broken)
    with pytest.raises(DataError, match="complex64"):
        plan_buckets([("p", "complex64", (2,))], 100)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 200_000), st.data())
def test_a_digest_changes_with_any_bit(words: int, data: st.DataObject) -> None:
    bytes_ = torch.randint(
        0, 256, (8 * (words + 1),), dtype=torch.uint8, generator=torch.Generator().manual_seed(words)
    )
    before = bucket_digest(bytes_)
    assert len(before) == DIGEST_BYTES and bucket_digest(bytes_.clone()) == before
    place = data.draw(st.integers(0, len(bytes_) - 1))
    changed = bytes_.clone()
    changed[place] ^= 1 << data.draw(st.integers(0, 7))
    assert bucket_digest(changed) != before
    assert bucket_digest(torch.cat([bytes_, torch.zeros(8, dtype=torch.uint8)])) != before, "length counts"


def test_a_digest_changes_with_flipped_signs_and_swapped_rows() -> None:
    weights = torch.randn(8, 4096 * 2)
    flipped = weights.clone()
    flipped[1:3, 1] *= -1  # flips the top bits of two words of one column, which a plain weighted sum would miss
    swapped = weights[[0, 2, 1, 3, 4, 5, 6, 7]]
    digests = {bucket_digest(w.contiguous().view(-1).view(torch.uint8)) for w in (weights, flipped, swapped)}
    assert len(digests) == 3


def test_a_bucket_carries_every_dtype_and_refuses_damage(source: Tensors) -> None:
    (spec,) = plan_buckets(source.parameter_specs(), 1 << 20)
    buffer = empty_bucket(spec, CPU)
    digest = fill_bucket(spec, source.tensors, buffer)
    assert equal(list(bucket_tensors(spec, buffer)), source)
    assert check_bucket(spec, buffer, place="here") == digest
    with pytest.raises(WeightTransferError, match="bucket 3"):
        check_bucket(replace(spec, digest="00" * DIGEST_BYTES), buffer, place="bucket 3")
    buffer[5] ^= 1
    with pytest.raises(WeightTransferError, match="nothing was applied"):
        check_bucket(spec, buffer, place="here")
    with pytest.raises(DataError, match="norm"):
        fill_bucket(spec, {**source.tensors, "norm": torch.zeros(6)}, buffer)


def test_gloo_transfers_all_tensors_to_two_receivers(source: Tensors, receiver: StagedReceiver) -> None:
    other = StagedReceiver(CPU, 0, None, frozenset())
    sender = WeightSender(source, bucket_bytes=400)
    group = connected(sender, [receiver, other])
    for version in range(2):
        manifest = sender.manifest(1, version, "gloo")
        assert len(manifest.buckets) > 2
        for each in (receiver, other):
            each.start_receive(encode_manifest(manifest), group, TIMEOUT)
        sent = sender.broadcast(manifest, TIMEOUT)
        for each in (receiver, other):
            progress = wait(each)
            assert progress["error"] is None and tuple(progress["digests"]) == tuple(b.digest for b in sent.buckets)
            assert equal(each.take(), source)
            assert each.take() == [], "what was taken is not staged any more"
        source.tensors["embed"] += 1
    others = tuple(replace(bucket, digest="00") for bucket in sent.buckets)
    assert weights_digest(sent) != weights_digest(replace(sent, buckets=others))
    sender.close()


def test_a_sender_that_dies_half_way_is_reported_at_once(source: Tensors, receiver: StagedReceiver) -> None:
    sender = WeightSender(source, bucket_bytes=400)
    group = connected(sender, [receiver])
    manifest = sender.manifest(1, 0, "gloo")
    receiver.start_receive(encode_manifest(manifest), group, TIMEOUT)
    assert sender._group is not None
    first = empty_bucket(manifest.buckets[0], CPU)
    with source.gather([t.name for t in manifest.buckets[0].tensors]) as tensors:
        fill_bucket(manifest.buckets[0], tensors, first)
    sender._group.broadcast(first, TIMEOUT)
    sender.close()
    progress = wait(receiver, 2.0)
    assert progress["error"][0] == "WeightTransferError" and receiver.take() == []

    group = connected(sender, [receiver])
    receiver.start_receive(encode_manifest(manifest), group, TIMEOUT)
    sender.broadcast(manifest, TIMEOUT)
    assert wait(receiver)["error"] is None and equal(receiver.take(), source)
    sender.close()


def test_a_receiver_that_leaves_is_reported_and_the_copy_is_complete(source: Tensors, receiver: StagedReceiver) -> None:
    sender = WeightSender(source, bucket_bytes=400)
    connected(sender, [receiver])
    assert receiver._group is not None
    receiver._group.close()
    with pytest.raises(WeightTransferError, match="broadcast"):
        sender.broadcast(sender.manifest(1, 0, "gloo"), TIMEOUT)
    offer = sender.start_copy("127.0.0.1", 1, TIMEOUT)
    receiver.start_join(asdict(offer.address), 1, TIMEOUT)
    assert wait(receiver)["error"] is None
    receiver.start_receive(encode_manifest(offer.manifest), offer.address.group_name, TIMEOUT)
    assert wait(receiver)["error"] is None and equal(receiver.take(), source)


def test_a_damaged_bucket_is_refused_and_the_group_stays_usable(source: Tensors, receiver: StagedReceiver) -> None:
    sender = WeightSender(source, bucket_bytes=400)
    group = connected(sender, [receiver])
    manifest = sender.manifest(1, 0, "gloo")
    assert sender._group is not None
    receiver.start_receive(encode_manifest(manifest), group, TIMEOUT)
    for number, spec in enumerate(manifest.buckets):
        buffer = empty_bucket(spec, CPU)
        fill_bucket(spec, source.tensors, buffer)
        buffer[0] ^= number == 1
        sender._group.broadcast(buffer, TIMEOUT)
    progress = wait(receiver)
    assert "bucket 2 of" in progress["error"][1] and receiver.take() == []
    receiver.start_receive(encode_manifest(manifest), group, TIMEOUT)
    sender.broadcast(manifest, TIMEOUT)
    assert wait(receiver)["error"] is None and equal(receiver.take(), source)
    sender.close()


def test_no_peer_waits_beyond_the_deadline(source: Tensors, receiver: StagedReceiver) -> None:
    sender = WeightSender(source, bucket_bytes=400)
    address = sender.prepare("127.0.0.1", 3, "gloo", 1.0)
    receiver.start_join(asdict(address), 1, 1.0)
    with pytest.raises(WeightTransferError, match="3 ranks"):
        sender.connect(1.0)
    assert wait(receiver, 3.0)["error"][0] == "WeightTransferError"
    group = connected(sender, [receiver])
    started = time.monotonic()
    receiver.start_receive(encode_manifest(sender.manifest(1, 0, "gloo")), group, 0.5)  # the sender never sends
    assert wait(receiver, 3.0)["error"][0] == "WeightTransferError"
    assert time.monotonic() - started < 2.0
    sender.close()


def test_a_receiver_outside_the_group_reports_an_error(source: Tensors, receiver: StagedReceiver) -> None:
    receiver.start_receive(
        encode_manifest(WeightSender(source, bucket_bytes=400).manifest(1, 0, "gloo")), "elsewhere", TIMEOUT
    )
    assert "must join first" in wait(receiver)["error"][1]


@pytest.mark.parametrize(("change", "why"), [("missing", "lacks"), ("unknown", "adds"), ("shape", "reshapes")])
def test_weights_of_another_model_are_refused_before_the_transfer(source: Tensors, change: str, why: str) -> None:
    expected = source.shapes()
    if change == "missing":
        expected["bias"] = (3,)
    elif change == "unknown":
        del expected["norm"]
    else:
        expected["norm"] = (6,)
    receiver = StagedReceiver(CPU, 0, expected, frozenset())
    receiver.start_receive(
        encode_manifest(WeightSender(source, bucket_bytes=400).manifest(1, 0, "gloo")), "any", TIMEOUT
    )
    assert why in wait(receiver)["error"][1]


def test_an_unchanged_version_has_no_buckets_and_renames_the_copy(source: Tensors, receiver: StagedReceiver) -> None:
    sender = WeightSender(source, bucket_bytes=400)
    sender.broadcast(sender.manifest(1, 4, "gloo"), TIMEOUT)
    manifest = sender.manifest(1, 5, "gloo", changed=False)
    assert manifest.buckets == ()
    sender.broadcast(manifest, TIMEOUT)
    receiver.start_receive(encode_manifest(manifest), "no group is needed", TIMEOUT)
    assert wait(receiver)["error"] is None and receiver.take() == []
    assert sender.copy is not None and sender.copy.manifest.policy_version == 5 and sender.copy.manifest.buckets


def test_the_copy_does_not_change_during_training(source: Tensors, receiver: StagedReceiver) -> None:
    sender = WeightSender(source, bucket_bytes=400)
    sender.broadcast(sender.manifest(1, 0, "gloo"), TIMEOUT)
    offer = sender.start_copy("127.0.0.1", 1, TIMEOUT)
    source.tensors["embed"] += 1
    receiver.start_join(asdict(offer.address), 1, TIMEOUT)
    assert wait(receiver)["error"] is None
    receiver.start_receive(encode_manifest(offer.manifest), offer.address.group_name, TIMEOUT)
    assert wait(receiver)["error"] is None and equal(receiver.take(), Tensors())


def test_disk_transfers_all_tensors_and_publishes_atomically(
    source: Tensors, receiver: StagedReceiver, tmp_path: Path
) -> None:
    sender = WeightSender(source, bucket_bytes=400)
    folder = tmp_path / "weights" / "000001"
    sent = sender.broadcast(sender.manifest(1, 1, "disk", location=str(folder)), TIMEOUT)
    assert sender.fetched_by_samplers("disk") and all(bucket.digest for bucket in sent.buckets)
    assert [path.name for path in folder.parent.iterdir()] == ["000001"], "no unfinished folder is left"
    receiver.start_receive(encode_manifest(sent), "", TIMEOUT)
    assert wait(receiver)["error"] is None and equal(receiver.take(), source)

    source.tensors["norm"] += 1
    other = tmp_path / "weights" / "000002"
    damaged = sender.broadcast(sender.manifest(1, 2, "disk", location=str(other)), TIMEOUT)
    receiver.start_receive(encode_manifest(replace(damaged, location=str(folder))), "", TIMEOUT)
    assert "digest" in wait(receiver)["error"][1], "an older version's files are not those the manifest names"
    (other / "bucket-00000.safetensors").write_bytes(b"cut")
    receiver.start_receive(encode_manifest(damaged), "", TIMEOUT)
    assert "cannot read weights" in wait(receiver)["error"][1] and receiver.take() == []


def test_a_full_disk_is_reported_and_leaves_no_unfinished_folder(
    source: Tensors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_tensors: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weight_sender, "save_file", full)
    sender = WeightSender(source, bucket_bytes=400)
    folder = tmp_path / "weights" / "000001"
    with pytest.raises(EnvironmentLackError, match=rf"no space left on the disk of {folder}: free some"):
        sender.broadcast(sender.manifest(1, 1, "disk", location=str(folder)), TIMEOUT)
    assert list(folder.parent.iterdir()) == []


def test_the_store_listens_on_its_host_alone() -> None:
    group_store = WeightGroupStore("127.0.0.1", "private", 2, "gloo", TIMEOUT)
    listening = {(c.laddr.ip, c.laddr.port) for c in psutil.Process().net_connections() if c.status == "LISTEN"}
    assert {ip for ip, port in listening if port == group_store.address.port} == {"127.0.0.1"}


def test_rank_0_may_join_after_the_others() -> None:
    group_store = WeightGroupStore("127.0.0.1", "late", 2, "gloo", TIMEOUT)
    joined: list[WeightGroup] = []
    thread = threading.Thread(target=lambda: joined.append(WeightGroup(group_store.address, 1, CPU, TIMEOUT)))
    thread.start()
    time.sleep(0.2)
    group = group_store.connect(CPU, TIMEOUT)
    thread.join(TIMEOUT)
    assert joined
    group.close()
    joined[0].close()
