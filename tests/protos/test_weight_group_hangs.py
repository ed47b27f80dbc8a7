"""A member of a weight group that hangs: nobody waits for it until the deadline."""

from __future__ import annotations

import threading
from concurrent.futures import wait
from dataclasses import asdict
from unittest.mock import Mock

import pytest
import torch

from tandem.protos.errors import WeightTransferError
from tandem.protos.manifest import encode_manifest
from tandem.protos.types import BucketSpec, TensorSpec, WeightGroupAddress, WeightManifest
from tandem.protos.weight_group import WeightGroup
from tandem.rollout.weight_receiver import StagedReceiver, _Transfer
from tandem.services.process import in_thread
from tests.support.memory_store import IN_MEMORY
from tests.support.waiting import eventually

CPU = torch.device("cpu")
TIMEOUT = 10.0
LONG = 600.0
"""Longer than a test may take."""


def opened(name: str, world_size: int, rank: int = 0) -> WeightGroup:
    return WeightGroup(WeightGroupAddress("127.0.0.1", name, world_size, "gloo"), rank, CPU, TIMEOUT, IN_MEMORY)


def test_a_sender_that_waits_for_a_receiver_that_hangs_can_be_interrupted() -> None:
    """Its bucket is larger than what the connection holds."""
    joining = in_thread("join", opened, "hangs", 2, 1)
    sender = opened("hangs", 2)
    receiver = joining.result(TIMEOUT)
    sending = in_thread("send", sender.broadcast, torch.zeros(64 << 20, dtype=torch.uint8), LONG)
    assert not wait([sending], 0.2).done
    sender.interrupt()
    assert isinstance(sending.exception(TIMEOUT), WeightTransferError)
    sender.interrupt()
    for group in (sender, receiver):
        group.close()
        group.interrupt()


def test_a_receiver_behind_one_that_hangs_joins_another_group_at_once() -> None:
    receiver = StagedReceiver(CPU, 0, None, frozenset())
    joining = in_thread("join", opened, "chain", 3, 1)
    receiver.start_join(asdict(WeightGroupAddress("127.0.0.1", "chain", 3, "gloo")), 2, IN_MEMORY, TIMEOUT)
    sender = opened("chain", 3)
    hung = joining.result(TIMEOUT)
    eventually(lambda: receiver.progress()["done"])
    bucket = BucketSpec(64, (TensorSpec("weight", "float32", (16,), 0, 64),))
    receiver.start_receive(encode_manifest(WeightManifest(1, 1, "gloo", (bucket,))), "chain", LONG)
    stuck = receiver._transfer
    assert stuck is not None and not stuck.progress["done"]
    sender.interrupt()
    receiver.start_join(asdict(WeightGroupAddress("127.0.0.1", "next", 2, "gloo")), 1, IN_MEMORY, TIMEOUT)
    opened("next", 2).close()
    eventually(lambda: receiver.progress()["done"])
    assert receiver.progress()["error"] is None
    assert stuck.progress["error"] is not None and stuck.progress["error"][0] == "WeightTransferError"
    sender.close()
    hung.close()


def test_a_transfer_waits_for_every_earlier_one_that_has_not_ended() -> None:
    def held(transfer: _Transfer) -> None:
        assert released.wait(TIMEOUT)

    released = threading.Event()
    first = _Transfer(TIMEOUT, held)
    first.start()
    second = _Transfer(0.05, lambda transfer: transfer.wait_for(first))
    second.start()
    third = _Transfer(TIMEOUT, lambda transfer: transfer.wait_for(second))
    third.start()
    second.join(TIMEOUT)
    assert second.progress["error"] == ("WeightTransferError", "the transfer before this one has not ended")
    third.join(0.1)
    assert not third.progress["done"], "the first one still runs"
    released.set()
    third.join(TIMEOUT)
    assert third.progress["done"] and third.progress["error"] is None


def test_a_group_that_its_transfer_drops_as_the_next_is_joined_is_interrupted_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    receiver = StagedReceiver(CPU, 0, None, frozenset())
    group, transfer = Mock(), Mock()

    def drops() -> bool:
        receiver._group = None
        return True

    transfer.is_alive = drops
    receiver._group, receiver._transfer = group, transfer
    monkeypatch.setattr(receiver, "_start", Mock())
    receiver.start_join(asdict(WeightGroupAddress("127.0.0.1", "next", 2, "gloo")), 1, IN_MEMORY, TIMEOUT)
    group.interrupt.assert_called_once()
