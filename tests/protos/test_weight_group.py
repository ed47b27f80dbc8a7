"""Buckets, digests, and all transfers from `WeightSender` to `StagedReceiver` that need no GPU, without an engine.
tests/protos/test_weight_gpus.py tests the others.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError

from tandem.protos.bucket_digest import DIGEST_BYTES
from tandem.protos.errors import (
    DataError,
    EnvironmentLackError,
    SchemaVersionError,
    UnavailableError,
    WeightTransferError,
)
from tandem.protos.manifest import (
    ALIGNMENT,
    decode_manifest,
    encode_manifest,
    plan_buckets,
    weights_digest,
)
from tandem.protos.store_source import StoreSource
from tandem.protos.types import BucketSpec, DigestAlgorithm, WeightGroupAddress, WeightManifest
from tandem.protos.weight_group import (
    WeightGroup,
    begin_digest,
    bucket_tensors,
    check_bucket,
    empty_bucket,
    fill_bucket,
)
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.trainer import weight_sender
from tandem.trainer.weight_sender import WeightSender
from tests.support.memory_store import IN_MEMORY
from tests.support.weight_pair import CPU, TIMEOUT, Pair, Tensors, connected, equal, error, wait


@pytest.fixture
def source() -> Tensors:
    return Tensors()


@pytest.fixture
def pair(source: Tensors) -> Iterator[Pair]:
    sender = WeightSender(source, bucket_bytes=400, store=IN_MEMORY)
    pair = Pair(sender, StagedReceiver(CPU, 0, source.shapes(), frozenset()))
    yield pair
    pair.sender.close()


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
    for manifest in (
        WeightManifest(2, 7, "gloo", buckets, "somewhere"),
        WeightManifest(2, 7, "gloo", buckets, encoding="delta", base=(1, 6)),
        WeightManifest(2, 7, "nccl", buckets, digest_algorithm="sums"),
    ):
        assert decode_manifest(encode_manifest(manifest)) == manifest


def test_inconsistent_manifests_are_refused(pair: Pair) -> None:
    data = encode_manifest(pair.sender.manifest(1, 3, "gloo"))
    for other in (b"3", b"99"):
        with pytest.raises(SchemaVersionError, match=f"{other.decode()}, this software reads 5: .* of one release"):
            decode_manifest(data.replace(b'"schema_version":5', b'"schema_version":' + other))
    with pytest.raises(DataError, match="does not fit"):
        decode_manifest(data.replace(b'"offset":0', b'"offset":4096'))
    no_base = [data.replace(b'"base":null', b'"base":' + text) for text in (b"[1]", b"[1,2,3]", b'["1","2"]', b"7")]
    no_encoding = data.replace(b'"encoding":"full"', b'"encoding":"zip"')
    no_algorithm = [data.replace(b'"xxh3"', text) for text in (b'"crc"', b"[]", b"null")]
    lacking = data.replace(b'"dtype"', b'"kind"')
    for broken in (b"", b"[]", b"{}", data[:-3], lacking, *no_base, no_encoding, *no_algorithm):
        with pytest.raises(DataError):
            decode_manifest(broken)
    with pytest.raises(DataError, match="complex64"):
        plan_buckets([("p", "complex64", (2,))], 100)


@pytest.mark.parametrize("algorithm", ["xxh3", "sums"])
def test_a_bucket_carries_every_dtype_and_refuses_damage(source: Tensors, algorithm: DigestAlgorithm) -> None:
    (spec,) = plan_buckets(source.parameter_specs(), 1 << 20)
    buffer = empty_bucket(spec, CPU)
    digest = fill_bucket(spec, source.tensors, buffer, algorithm)

    def check(spec: BucketSpec, place: str = "here") -> str:
        return check_bucket(spec, buffer, begin_digest(buffer[: spec.num_bytes], algorithm), place=place)

    assert equal(list(bucket_tensors(spec, buffer)), source)
    assert check(spec) == digest
    with pytest.raises(WeightTransferError, match="bucket 3"):
        check(replace(spec, digest="00" * DIGEST_BYTES), "bucket 3")
    buffer[5] ^= 1
    with pytest.raises(WeightTransferError, match="nothing was applied"):
        check(spec)
    with pytest.raises(DataError, match="norm"):
        fill_bucket(spec, {**source.tensors, "norm": torch.zeros(6)}, buffer, algorithm)


def test_gloo_transfers_all_tensors_to_two_receivers(source: Tensors, pair: Pair) -> None:
    receivers = (pair.receiver, StagedReceiver(CPU, 0, None, frozenset()))
    group = connected(pair.sender, receivers)
    for version in range(2):
        manifest = pair.sender.manifest(1, version, "gloo")
        assert len(manifest.buckets) > 2
        for each in receivers:
            each.start_receive(encode_manifest(manifest), group, TIMEOUT)
        before = [each.progress() for each in receivers]
        sent = pair.sender.broadcast(manifest, TIMEOUT)
        for each in receivers:
            progress = wait(each)
            assert not any(one["done"] for one in before), "what was told does not change later"
            assert progress["error"] is None and tuple(progress["digests"]) == tuple(b.digest for b in sent.buckets)
            assert equal(each.take(), source)
            assert each.take() == [], "what was taken is not staged any more"
        source.tensors["embed"] += 1
    others = tuple(replace(bucket, digest="00") for bucket in sent.buckets)
    assert weights_digest(sent) != weights_digest(replace(sent, buckets=others))


def broadcast(pair: Pair, source: Tensors, specs: Sequence[BucketSpec], damaged: int = -1) -> None:
    """Sends buckets without the sender's loop; the first byte of the one numbered `damaged` is changed."""
    assert pair.sender._group is not None
    for number, spec in enumerate(specs):
        buffer = empty_bucket(spec, CPU)
        fill_bucket(spec, source.tensors, buffer, "xxh3")
        buffer[0] ^= number == damaged
        pair.sender._group.broadcast(buffer, TIMEOUT)


def test_a_sender_that_dies_half_way_is_reported_at_once(source: Tensors, pair: Pair) -> None:
    pair.join()
    manifest = pair.sender.manifest(1, 0, "gloo")
    pair.start(manifest)
    broadcast(pair, source, manifest.buckets[:1])
    pair.sender.close()
    assert error(pair.receiver, 2.0)[0] == "WeightTransferError"
    pair.join()
    pair.send(manifest)
    assert equal(pair.staged(), source)


def test_a_receiver_that_leaves_is_reported_and_the_copy_is_complete(source: Tensors, pair: Pair) -> None:
    pair.join()
    assert pair.receiver._group is not None
    pair.receiver._group.close()
    with pytest.raises(WeightTransferError, match="broadcast"):
        pair.sender.broadcast(pair.sender.manifest(1, 0, "gloo"), TIMEOUT)
    pair.copy()
    assert equal(pair.staged(), source)


def test_a_damaged_bucket_is_refused_and_the_group_stays_usable(source: Tensors, pair: Pair) -> None:
    pair.join()
    manifest = pair.sender.manifest(1, 0, "gloo")
    pair.start(manifest)
    broadcast(pair, source, manifest.buckets, damaged=1)
    assert "bucket 2 of" in error(pair.receiver)[1]
    pair.send(manifest)
    assert equal(pair.staged(), source)


def test_no_peer_waits_beyond_the_deadline(pair: Pair) -> None:
    address = pair.sender.prepare("127.0.0.1", 3, "gloo")
    pair.receiver.start_join(asdict(address), 1, IN_MEMORY, 1.0)
    with pytest.raises(WeightTransferError, match="3 ranks"):
        pair.sender.connect(1.0)
    assert error(pair.receiver, 3.0)[0] == "WeightTransferError"
    pair.join()
    pair.start(pair.sender.manifest(1, 0, "gloo"), 0.5)  # the sender never sends
    assert error(pair.receiver, 2.0)[0] == "WeightTransferError"


def test_a_receiver_outside_the_group_reports_an_error(pair: Pair) -> None:
    pair.group = "elsewhere"
    pair.start(pair.sender.manifest(1, 0, "gloo"))
    assert "must join first" in error(pair.receiver)[1]


@pytest.mark.parametrize(
    ("name", "shape", "why"), [("bias", (3,), "lacks"), ("norm", None, "adds"), ("norm", (6,), "reshapes")]
)
def test_weights_of_another_model_are_refused_before_the_transfer(
    source: Tensors, pair: Pair, name: str, shape: tuple[int, ...] | None, why: str
) -> None:
    expected = {**source.shapes(), name: shape}
    pair.receiver = StagedReceiver(CPU, 0, {n: each for n, each in expected.items() if each is not None}, frozenset())
    pair.start(pair.sender.manifest(1, 0, "gloo"))
    assert why in error(pair.receiver)[1]


def test_an_unchanged_version_has_no_buckets_and_renames_the_copy(pair: Pair) -> None:
    pair.sender.broadcast(pair.sender.manifest(1, 4, "gloo"), TIMEOUT)
    manifest = pair.sender.manifest(1, 5, "gloo", changed=False)
    assert manifest.buckets == ()
    pair.send(manifest)
    assert pair.staged() == {}
    copy = pair.sender.copy
    assert copy is not None and copy.manifest.policy_version == 5 and copy.manifest.buckets


def test_the_copy_does_not_change_during_training(source: Tensors, pair: Pair) -> None:
    pair.sender.broadcast(pair.sender.manifest(1, 0, "gloo"), TIMEOUT)
    source.tensors["embed"] += 1
    pair.copy()
    assert equal(pair.staged(), Tensors())


def test_disk_transfers_all_tensors_and_publishes_atomically(source: Tensors, pair: Pair, tmp_path: Path) -> None:
    sender, folder = pair.sender, tmp_path / "weights" / "000001"
    sent = sender.broadcast(sender.manifest(1, 1, "disk", location=str(folder)), TIMEOUT)
    assert sender.fetched_by_samplers("disk") and all(bucket.digest for bucket in sent.buckets)
    assert [path.name for path in folder.parent.iterdir()] == ["000001"], "no unfinished folder is left"
    pair.start(sent)
    assert equal(pair.staged(), source)

    source.tensors["norm"] += 1
    other = tmp_path / "weights" / "000002"
    damaged = sender.broadcast(sender.manifest(1, 2, "disk", location=str(other)), TIMEOUT)
    pair.start(replace(damaged, location=str(folder)))
    assert "digest" in error(pair.receiver)[1], "an older version's files are not those the manifest names"
    (other / "bucket-00000.safetensors").write_bytes(b"cut")
    pair.start(damaged)
    assert "cannot read weights" in error(pair.receiver)[1]


def test_a_full_disk_is_reported_and_leaves_no_unfinished_folder(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_tensors: object, file: Path) -> None:
        file.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(weight_sender, "save_file", full)
    folder = tmp_path / "weights" / "000001"
    with pytest.raises(EnvironmentLackError, match=rf"no space left on the disk of {folder}: free some"):
        pair.sender.broadcast(pair.sender.manifest(1, 1, "disk", location=str(folder)), TIMEOUT)
    assert list(folder.parent.iterdir()) == []


def test_rank_0_may_join_after_the_others() -> None:
    address = WeightGroupAddress("127.0.0.1", "late", 2, "gloo")
    joined: list[WeightGroup] = []
    thread = threading.Thread(target=lambda: joined.append(WeightGroup(address, 1, CPU, TIMEOUT, IN_MEMORY)))
    thread.start()
    time.sleep(0.2)
    group = WeightGroup(address, 0, CPU, TIMEOUT, IN_MEMORY)
    thread.join(TIMEOUT)
    assert joined
    group.close()
    joined[0].close()


class AwayStore(dist.Store):
    """Its server does not answer."""

    def set(self, key: str, value: str) -> None:
        raise UnavailableError("Redis cannot be reached")


def open_no_store() -> dist.Store:
    raise UnavailableError("Redis cannot be reached")


@pytest.mark.parametrize("opener", ["open_no_store", "AwayStore"])
def test_a_store_that_is_away_is_a_failed_transfer(opener: str) -> None:
    """The sender goes on without this group."""
    address, store = WeightGroupAddress("127.0.0.1", "away", 2, "gloo"), StoreSource(f"{__name__}:{opener}", ())
    with pytest.raises(WeightTransferError, match=r"did not come together .*: Redis cannot be reached"):
        WeightGroup(address, 0, CPU, TIMEOUT, store)


def test_a_host_that_cannot_be_reached_is_reported() -> None:
    with pytest.raises(WeightTransferError, match=r"no\.such\.host\.invalid cannot be reached"):
        WeightGroup(WeightGroupAddress("no.such.host.invalid", "lost", 2, "gloo"), 0, CPU, TIMEOUT, IN_MEMORY)
