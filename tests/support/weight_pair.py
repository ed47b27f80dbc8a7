"""A `WeightSender` with made-up weights, and `StagedReceiver`s in one group with it, without engines."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict

import torch

from tandem.protos.manifest import ParameterSpec, encode_manifest
from tandem.protos.types import WeightManifest
from tandem.rollout.sampler import TransferProgress
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.trainer.weight_sender import WeightSender
from tandem.trainer.weight_snapshot import WeightSnapshot
from tests.support.memory_store import IN_MEMORY

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


def error(receiver: StagedReceiver, seconds: float = TIMEOUT) -> tuple[str, str]:
    """Class and message of the error that ended the transfer."""
    found = wait(receiver, seconds)["error"]
    assert found is not None and receiver.take() == []
    return found


def wait(receiver: StagedReceiver, seconds: float = TIMEOUT) -> TransferProgress:
    deadline = time.monotonic() + seconds
    while not receiver.progress()["done"]:
        assert time.monotonic() < deadline, "the receiver's own deadline must come first"
        time.sleep(0.005)
    return receiver.progress()


def equal(received: Iterable[tuple[str, torch.Tensor]] | Mapping[str, torch.Tensor], source: Tensors) -> bool:
    found = dict(received)
    return found.keys() == source.tensors.keys() and all(found[name].equal(source.tensors[name]) for name in found)


def connected(sender: WeightSender, receivers: Sequence[StagedReceiver]) -> str:
    address = sender.prepare("127.0.0.1", 1 + len(receivers), "gloo")
    for number, receiver in enumerate(receivers):
        receiver.start_join(asdict(address), 1 + number, IN_MEMORY, TIMEOUT)
    sender.connect(TIMEOUT)
    for receiver in receivers:
        assert wait(receiver)["error"] is None
    return address.group_name


class Pair:
    """A sender and a receiver, in one weight group after `join`."""

    def __init__(self, sender: WeightSender, receiver: StagedReceiver) -> None:
        self.sender = sender
        self.receiver = receiver
        self.group = ""

    def join(self) -> None:
        self.group = connected(self.sender, [self.receiver])

    def start(self, manifest: WeightManifest, seconds: float = TIMEOUT) -> None:
        """Lets the receiver wait for the version."""
        self.receiver.start_receive(encode_manifest(manifest), self.group, seconds)

    def send(
        self, manifest: WeightManifest, snapshot: WeightSnapshot | None = None
    ) -> tuple[WeightManifest, TransferProgress]:
        self.start(manifest)
        return self.sender.broadcast(manifest, TIMEOUT, snapshot), wait(self.receiver)

    def staged(self) -> dict[str, torch.Tensor]:
        """What the receiver has staged without an error."""
        assert wait(self.receiver)["error"] is None
        return dict(self.receiver.take())

    def copy(self, sender: WeightSender | None = None, **options: bool) -> WeightManifest:
        """Sends the copy to the receiver, as to a late joiner."""
        offer = (sender or self.sender).start_copy("127.0.0.1", 1, TIMEOUT, **options)
        self.receiver.start_join(asdict(offer.address), 1, IN_MEMORY, TIMEOUT)
        assert wait(self.receiver)["error"] is None
        self.group = offer.address.group_name
        self.start(offer.manifest)
        return offer.manifest
