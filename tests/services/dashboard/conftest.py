"""A run that Redis knows, with a controller that notes its orders, shown by a dashboard."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from tandem.protos import common_pb2, control_pb2, control_pb2_grpc
from tandem.protos.errors import EnvironmentLackError
from tandem.services.buffer.buffer import Buffer
from tandem.services.dashboard.run_source import RunSource
from tandem.services.rpc.server import ServerThread
from tandem.services.rpc.tokens import Tokens
from tandem.services.run.folder import CONFIG_FILE
from tests.support.dashboard import Browser, serving
from tests.support.made_up_run import make_run
from tests.support.redis_ring import new_run


class Controller(control_pb2_grpc.ControlServiceServicer):
    """Answers Status with a sampler and a trainer, and notes what is ordered."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        self.orders: list[object] = []

    async def Status(
        self, request: control_pb2.StatusRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.StatusReply:
        services = [
            control_pb2.StatusReply.Service(name=name, kind=name.partition("-")[0], state="running", restarts=restarts)
            for name, restarts in (("rollout-0", 2), ("trainer", 0))
        ]
        return control_pb2.StatusReply(
            services=services,
            counts=self.buffer.counts(),
            desired_replicas={"rollout": 1},
            warnings=["a <b>warning</b>"],
        )

    async def Scale(
        self, request: control_pb2.ScaleRequest, context: grpc.aio.ServicerContext
    ) -> control_pb2.ScaleReply:
        self.orders.append((request.service, request.replicas))
        return control_pb2.ScaleReply()


@dataclass(frozen=True)
class Site:
    """A dashboard that shows one run."""

    address: str
    source: RunSource
    buffer: Buffer
    controller: Controller
    secret: str

    def browser(self) -> Browser:
        return Browser(self.address)


def no_secret(folder: Path) -> str:
    raise EnvironmentLackError(f"{folder} holds no Redis data")


@contextmanager
def shown_run(
    folder: Path, redis_url: str, credentials: grpc.ServerCredentials | None = None, **settings: object
) -> Iterator[Site]:
    """A run with these settings of `[run]`, whose controller has these credentials."""
    run_id = f"site-{folder.name.replace('_', '-')}"[:60].rstrip("-")
    files = make_run(folder, run_id, redis_url=redis_url)
    change_run(files, **settings)
    buffer = new_run(redis_url, run_id=run_id)
    controller, secret = Controller(buffer), buffer.secret()
    server = ServerThread(
        "127.0.0.1",
        0,
        info=common_pb2.InfoReply,
        register=lambda one: control_pb2_grpc.add_ControlServiceServicer_to_server(controller, one),
        service_names=["tandem.v1.ControlService"],
        tokens=Tokens.of_run(secret),
        credentials=credentials,
    )
    buffer.register_service("controller", server.address)
    source = RunSource(files, no_secret)
    try:
        with serving([source]) as address:
            yield Site(address, source, buffer, controller, secret)
    finally:
        server.stop(0.1)
        buffer.close()


def change_run(folder: Path, **settings: object) -> None:
    """Changes settings of `[run]` in the saved recipe."""
    file = folder / CONFIG_FILE
    values = json.loads(file.read_text())
    values["run"] |= settings
    file.write_text(json.dumps(values))


@pytest.fixture
def site(tmp_path: Path, redis_url: str) -> Iterator[Site]:
    with shown_run(tmp_path, redis_url) as shown:
        yield shown
