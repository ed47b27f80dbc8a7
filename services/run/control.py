"""The supervisor's gRPC service: status, ledger, and stopping the run."""

from __future__ import annotations

import asyncio
import time
from importlib.metadata import PackageNotFoundError, version

import grpc

from tandem.protos import common_pb2, control_pb2, control_pb2_grpc
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.rpc.server import ServerThread
from tandem.services.run.process_group import ProcessGroup


def software_version() -> str:
    """Tandem's installed version, or `source` in a checkout that is not installed."""
    try:
        return version("tandem-rl")
    except PackageNotFoundError:
        return "source"


class ControlServer(control_pb2_grpc.ControlServiceServicer):
    """Context manager that serves ControlService, Info, health and reflection on a free port of `run.host`."""

    def __init__(self, recipe: Recipe, processes: ProcessGroup, buffer: Buffer) -> None:
        self._recipe = recipe
        self._processes = processes
        self._buffer = buffer
        self._started_at = time.time()
        self._server = ServerThread(
            recipe.run.host,
            0,
            info=self._info,
            register=lambda server: control_pb2_grpc.add_ControlServiceServicer_to_server(self, server),
            service_names=["tandem.v1.ControlService"],
        )
        self.address = self._server.address

    def __enter__(self) -> ControlServer:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.stop(grace_seconds=0.1)

    def _info(self) -> common_pb2.InfoReply:
        counts = self._buffer.counts()
        return common_pb2.InfoReply(
            service="controller",
            software_version=software_version(),
            started_at=self._started_at,
            policy_version=counts["published_version"],
            incarnation=counts["incarnation"],
            run_id=self._recipe.run.run_id,
            figures={name: float(count) for name, count in counts.items()},
            activity="supervising the services",
        )

    async def GetStatus(
        self, request: control_pb2.GetStatusRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetStatusReply:
        addresses = await asyncio.to_thread(self._buffer.services)
        addresses |= {sampler.id: sampler.address for sampler in await asyncio.to_thread(self._buffer.samplers)}
        services = [
            control_pb2.GetStatusReply.Service(
                name=name, pid=pid, state=state, restarts=restarts, address=addresses.get(name, "")
            )
            for name, (state, pid, restarts) in self._processes.states().items()
        ]
        return control_pb2.GetStatusReply(
            run_id=self._recipe.run.run_id, run_dir=str(self._recipe.folder.resolve()), services=services
        )

    async def GetLedger(
        self, request: control_pb2.GetLedgerRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.GetLedgerReply:
        counts = await asyncio.to_thread(self._buffer.counts)
        return control_pb2.GetLedgerReply(counts=counts, violations=await asyncio.to_thread(self._buffer.verify))

    async def StopRun(
        self, request: control_pb2.StopRunRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.StopRunReply:
        self._processes.request_stop()
        return control_pb2.StopRunReply()
