"""The controller's gRPC service: what a run does, and the orders of operators."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import grpc

from tandem.protos import control_pb2, control_pb2_grpc
from tandem.services.control.autoscaler import Autoscaler
from tandem.services.control.controller import Controller
from tandem.services.control.status import status_of
from tandem.services.metrics.ledger import ledger_figures
from tandem.services.run.endpoint import service_endpoint
from tandem.services.service_info import ServiceInfo

log = logging.getLogger(__name__)

SERVICE_NAME = "tandem.v1.ControlService"
_SHORTEST_PAUSE_SECONDS = 0.5
_LONGEST_SILENCE_SECONDS = 2.0

Context = grpc.aio.ServicerContext
Reply = control_pb2.StatusReply


@contextmanager
def control_server(
    controller: Controller, stop: threading.Event, report: Callable[[str], None] = log.info
) -> Iterator[str]:
    """Serves ControlService, Info, health and reflection on `run.host`; yields the address. Sets `stop` once the run
    has ended. Runs the autoscaler if the recipe says so; `report` gets its decisions.
    """
    buffer, recipe = controller.buffer, controller.recipe
    with ExitStack() as stack:
        decisions: Callable[[], list[Reply.Decision]] = list
        if recipe.autoscale.mode != "off":
            decisions = stack.enter_context(Autoscaler(recipe, controller, report)).decisions
        servicer = ControlServicer(controller, decisions)
        info = ServiceInfo("controller", dict, lambda: "supervising the services", buffer, controller.published_version)
        endpoint = service_endpoint(
            info,
            recipe,
            stop,
            port=recipe.run.control_port,
            register=lambda server: control_pb2_grpc.add_ControlServiceServicer_to_server(servicer, server),
            service_names=[SERVICE_NAME],
            more={"ledger": lambda: ledger_figures(controller.observe())},
        )
        yield stack.enter_context(endpoint)


@dataclass(frozen=True, slots=True)
class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    controller: Controller
    decisions: Callable[[], list[Reply.Decision]]

    async def Status(self, request: control_pb2.StatusRequest, context: Context) -> Reply:
        return await asyncio.to_thread(self._status)

    async def Watch(self, request: control_pb2.WatchRequest, context: Context) -> AsyncIterator[Reply]:
        sent, sent_at = b"", 0.0
        while True:
            status = await asyncio.to_thread(self._status)
            compared = _without_ages(status)
            if compared != sent or time.monotonic() - sent_at >= _LONGEST_SILENCE_SECONDS:
                sent, sent_at = compared, time.monotonic()
                yield status
            await asyncio.sleep(_SHORTEST_PAUSE_SECONDS)

    async def GetLedger(self, request: control_pb2.GetLedgerRequest, context: Context) -> control_pb2.GetLedgerReply:
        buffer = self.controller.buffer
        counts = await asyncio.to_thread(buffer.counts)
        return control_pb2.GetLedgerReply(counts=counts, violations=await asyncio.to_thread(buffer.verify))

    async def Scale(self, request: control_pb2.ScaleRequest, context: Context) -> control_pb2.ScaleReply:
        await asyncio.to_thread(self.controller.scale, request.service, request.replicas)
        return control_pb2.ScaleReply()

    async def Drain(self, request: control_pb2.DrainSamplerRequest, context: Context) -> control_pb2.DrainSamplerReply:
        await asyncio.to_thread(self.controller.drain, request.name)
        return control_pb2.DrainSamplerReply()

    async def Pause(
        self, request: control_pb2.PauseSamplersRequest, context: Context
    ) -> control_pb2.PauseSamplersReply:
        names = await asyncio.to_thread(self.controller.pause, request.name)
        return control_pb2.PauseSamplersReply(names=names)

    async def Resume(
        self, request: control_pb2.ResumeSamplersRequest, context: Context
    ) -> control_pb2.ResumeSamplersReply:
        names = await asyncio.to_thread(self.controller.resume, request.name)
        return control_pb2.ResumeSamplersReply(names=names)

    async def Checkpoint(self, request: control_pb2.CheckpointRequest, context: Context) -> control_pb2.CheckpointReply:
        await asyncio.to_thread(self.controller.checkpoint)
        return control_pb2.CheckpointReply()

    async def Stop(self, request: control_pb2.StopRequest, context: Context) -> control_pb2.StopReply:
        await asyncio.to_thread(self.controller.stop)
        return control_pb2.StopReply()

    def _status(self) -> Reply:
        return status_of(self.controller, self.decisions())


def _without_ages(status: Reply) -> bytes:
    """The status without what changes all the time."""
    copy = Reply()
    copy.CopyFrom(status)
    for service in copy.services:
        service.ClearField("heartbeat_age_seconds")
    return copy.SerializeToString(deterministic=True)
