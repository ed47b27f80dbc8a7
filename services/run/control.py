"""The supervisor's gRPC service: status, ledger, and stopping the run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from tandem.protos import control_pb2, control_pb2_grpc
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.rpc.server import ServerThread
from tandem.services.run.endpoint import server_security
from tandem.services.run.process_group import ProcessGroup
from tandem.services.run.scaling import Scaling
from tandem.services.service_info import ServiceInfo


@contextmanager
def control_server(recipe: Recipe, processes: ProcessGroup, buffer: Buffer, scaling: Scaling) -> Iterator[str]:
    """Serves ControlService, Info, health and reflection on a free port of `run.host`; yields the address."""
    servicer = ControlServicer(recipe, processes, buffer, scaling)
    info = ServiceInfo("controller", dict, lambda: "supervising the services", buffer, buffer.published_version)
    server = ServerThread(
        recipe.run.host,
        0,
        info=info.reply,
        register=lambda server: control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server),
        service_names=["tandem.v1.ControlService"],
        **server_security(recipe, buffer),
    )
    try:
        buffer.register_service("controller", server.address)
        yield server.address
    finally:
        server.stop(grace_seconds=0.1)


@dataclass(frozen=True, slots=True)
class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    recipe: Recipe
    processes: ProcessGroup
    buffer: Buffer
    scaling: Scaling

    async def GetStatus(
        self, request: control_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetStatusReply:
        addresses = await asyncio.to_thread(self.buffer.services)
        addresses |= {sampler.id: sampler.address for sampler in await asyncio.to_thread(self.buffer.samplers)}
        services = [
            control_pb2.GetStatusReply.Service(
                name=name, pid=pid, state=state, restarts=restarts, address=addresses.get(name, "")
            )
            for name, (state, pid, restarts) in self.processes.states().items()
        ]
        return control_pb2.GetStatusReply(
            run_id=self.recipe.run.run_id, run_dir=str(self.recipe.folder.resolve()), services=services
        )

    async def GetLedger(
        self, request: control_pb2.GetLedgerRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetLedgerReply:
        counts = await asyncio.to_thread(self.buffer.counts)
        return control_pb2.GetLedgerReply(counts=counts, violations=await asyncio.to_thread(self.buffer.verify))

    async def Scale(
        self, request: control_pb2.ScaleRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.ScaleReply:
        await asyncio.to_thread(self.scaling.scale, request.service, request.replicas)
        return control_pb2.ScaleReply()

    async def StopRun(
        self, request: control_pb2.StopRunRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.StopRunReply:
        self.processes.request_stop()
        return control_pb2.StopRunReply()
