"""The publishing side of a trainer and samplers without engines, which receive with the real receiver."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path

import grpc
import torch

from tandem.protos import common_pb2, rollout_pb2, rollout_pb2_grpc
from tandem.protos.errors import error_class
from tandem.protos.manifest import decode_manifest
from tandem.protos.store_source import StoreSource
from tandem.protos.types import WeightGroupAddress, WeightManifest
from tandem.rollout.weight_receiver import StagedReceiver
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.store_source import redis_store
from tandem.services.buffer.types import Sampler
from tandem.services.rpc.server import ServerThread
from tandem.services.trainer.publisher import Publication, Publisher
from tandem.trainer.weight_sender import WeightSender
from tandem.trainer.weight_snapshot import WeightSnapshot
from tests.support.trainer_ring import make_recipe, make_run

CPU = torch.device("cpu")


class Weights:
    """A source of weights, like a learner, in which all weights equal one number."""

    rank = 0

    def __init__(self) -> None:
        self.value = 0.0

    def parameter_specs(self) -> list[tuple[str, str, Sequence[int]]]:
        return [("embed", "float32", (30, 7)), ("head", "float32", (11,))]

    @contextmanager
    def gather(self, names: Sequence[str]) -> Iterator[Mapping[str, torch.Tensor]]:
        yield {name: torch.full(tuple(shape), self.value) for name, _, shape in self.parameter_specs() if name in names}


class FakeSampler(rollout_pb2_grpc.RolloutServiceServicer):
    """A sampler without an engine: it receives with the real receiver and records the updates it is told to apply."""

    def __init__(
        self, buffer: Buffer, sampler_id: str, store: StoreSource, receiver: StagedReceiver | None = None
    ) -> None:
        self.id = sampler_id
        self._store = store
        self.version = -1
        self.value = float("nan")
        self.applied: dict[str, torch.Tensor] = {}
        self.updates = self.num_differences = 0
        self.joins = self.joined_incarnation = 0
        self.fault: Exception | None = None
        self.hold = threading.Event()
        self.hold.set()
        self._buffer = buffer
        self._receiver = receiver or StagedReceiver(CPU, 0, None, frozenset())
        register = partial(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, self)
        self._server = ServerThread("127.0.0.1", 0, info=common_pb2.InfoReply, register=register)
        self.start()

    def start(self) -> None:
        self._buffer.register_sampler(self.id, self._server.address, 1)

    def restart(self, receiver: StagedReceiver) -> None:
        """Restarts as a new process would, with no weights."""
        self.version, self._receiver, self.applied = -1, receiver, {}
        self.start()

    def stop(self) -> None:
        self._server.stop(grace_seconds=0.0)

    async def JoinWeightGroup(
        self, request: rollout_pb2.JoinWeightGroupRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.JoinWeightGroupReply:
        address = WeightGroupAddress(request.host, request.group_name, request.world_size, request.backend)
        self._receiver.start_join(asdict(address), request.first_rank, self._store, request.timeout_seconds)
        await self._end_of_job()
        self.joins += 1
        self.joined_incarnation = request.incarnation
        return rollout_pb2.JoinWeightGroupReply()

    async def UpdateWeights(
        self, request: rollout_pb2.UpdateWeightsRequest, context: grpc.aio.ServicerContext
    ) -> rollout_pb2.UpdateWeightsReply:
        if self.fault is not None:
            raise self.fault
        await asyncio.to_thread(self.hold.wait, 20.0)
        manifest = decode_manifest(request.manifest)
        self._receiver.start_receive(request.manifest, request.group_name, request.timeout_seconds)
        digests = await self._end_of_job()
        self.applied |= self._receiver.take()
        for tensor in self.applied.values():
            self.value = float(tensor.flatten()[0])
        self.version = manifest.policy_version
        self.updates += 1
        self.num_differences += manifest.base is not None
        return rollout_pb2.UpdateWeightsReply(
            policy_version=self.version, digests=digests, transfer_seconds=0.25, stall_seconds=0.125
        )

    async def _end_of_job(self) -> list[str]:
        while not (progress := self._receiver.progress())["done"]:
            await asyncio.sleep(0.002)
        if progress["error"]:
            raise error_class(progress["error"][0])(progress["error"][1])
        return list(progress["digests"])


class PublishingRing:
    """A trainer's publishing side and the samplers it knows."""

    def __init__(
        self, folder: Path, url: str, backend: str = "gloo", deadline_seconds: float = 5.0, encoding: str = "full"
    ) -> None:
        weights = {"backend": backend, "deadline_seconds": deadline_seconds, "encoding": encoding}
        recipe = make_recipe(folder, weights=weights)
        self.buffer = make_run(url, recipe)
        self.weights = Weights()
        self.store = redis_store(url, recipe.run.run_id, "weights")
        self.sender = WeightSender(self.weights, bucket_bytes=512, store=self.store, encoding=encoding)
        self.incarnation = self.buffer.begin_incarnation()
        self.publisher = Publisher(self.buffer, self.sender, recipe, self.incarnation)
        self.recipe = recipe
        self.samplers: list[FakeSampler] = []

    def sampler(self, sampler_id: str) -> FakeSampler:
        self.samplers.append(FakeSampler(self.buffer, sampler_id, self.store))
        return self.samplers[-1]

    def publish(self, version: int, *, changed: bool = True) -> Publication:
        if changed:
            self.weights.value = float(version)
        return self.publisher.publish(*self.snapshot(version, changed=changed))

    def snapshot(self, version: int, *, changed: bool = True) -> tuple[WeightManifest, WeightSnapshot]:
        location = str(self.recipe.weights_folder / f"{version:06d}")
        backend = self.recipe.weights.backend
        manifest = self.sender.manifest(self.incarnation, version, backend, changed=changed, location=location)
        return manifest, self.sender.snapshot(manifest)

    def registered(self, sampler_id: str) -> Sampler:
        return next(sampler for sampler in self.buffer.samplers() if sampler.id == sampler_id)

    def close(self) -> None:
        for sampler in self.samplers:
            sampler.hold.set()
        self.publisher.close()
        for sampler in self.samplers:
            sampler.stop()
        self.buffer.close()
