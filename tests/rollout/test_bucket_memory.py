"""Memory of received buckets, and models that load a version while it arrives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tandem.protos.errors import WeightTransferError
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.trainer.weight_sender import WeightSender
from tests.support.memory_store import IN_MEMORY
from tests.support.weight_pair import CPU, Pair, Tensors, equal, error


@pytest.fixture
def source() -> Tensors:
    return Tensors()


@pytest.fixture
def pair(source: Tensors) -> Iterator[Pair]:
    sender = WeightSender(source, bucket_bytes=400, store=IN_MEMORY)
    pair = Pair(sender, StagedReceiver(CPU, 0, source.shapes(), frozenset()))
    pair.join()
    yield pair
    pair.sender.close()


def test_memory_of_a_version_is_used_again_once_nothing_refers_to_it(source: Tensors, pair: Pair) -> None:
    pair.send(pair.sender.manifest(1, 0, "gloo"))
    first = pair.staged()
    source.tensors["embed"] += 1
    pair.send(pair.sender.manifest(1, 1, "gloo"))
    second = pair.staged()
    assert equal(second, source) and equal(first, Tensors()), "the engine may still read the first"
    places = {tensor.data_ptr() for tensor in first.values()}
    del first
    pair.send(pair.sender.manifest(1, 2, "gloo"))
    assert {tensor.data_ptr() for tensor in pair.staged().values()} == places


def test_a_model_that_copies_what_it_loads_needs_memory_of_two_buckets(source: Tensors, pair: Pair) -> None:
    pair.receiver._load = lambda tensors: [(name, tensor.clone()) for name, tensor in tensors]
    for version in range(2):
        manifest = pair.sender.manifest(1, version, "gloo")
        pair.send(manifest)
        assert equal(pair.staged(), source)
    assert len(manifest.buckets) > len(pair.receiver._memory._free) <= 2


def test_a_version_that_cannot_be_loaded_is_received_to_its_end(source: Tensors, pair: Pair) -> None:
    def fail_at_second(tensors: Iterator[tuple[str, torch.Tensor]]) -> list[object]:
        next(tensors), next(tensors)
        raise WeightTransferError("no such layer")

    pair.receiver._load = fail_at_second
    manifest = pair.sender.manifest(1, 0, "gloo")
    _, progress = pair.send(manifest)
    assert error(pair.receiver)[1] == "no such layer" and len(progress["digests"]) == len(manifest.buckets) > 2
    pair.receiver._load = list
    pair.send(manifest)
    assert equal(pair.staged(), source)
