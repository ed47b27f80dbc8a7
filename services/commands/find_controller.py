"""How commands find the controller of a run: beside its run folder, through its Redis, or by its address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from tandem.protos import control_pb2_grpc
from tandem.protos.errors import EnvironmentLackError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.orders import Orders
from tandem.services.config import load_resolved
from tandem.services.rpc.certificates import CERTIFICATES_VARIABLE, channel_credentials
from tandem.services.rpc.client import connect, translated
from tandem.services.rpc.tokens import TOKEN_VARIABLE, Role, run_token
from tandem.services.run.folder import CONFIG_FILE, external_redis_url, redis_required, resume_command, running

_REDIS_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ControllerPlace:
    """Where a controller listens, and what its callers need."""

    address: str
    token: str
    credentials: grpc.ChannelCredentials | None = None
    server_name: str = ""

    @contextmanager
    def stub(self) -> Iterator[control_pb2_grpc.ControlServiceStub]:
        """A stub whose calls raise TandemErrors."""
        with connect(self.address, self.token, self.credentials, self.server_name) as channel, translated():
            yield control_pb2_grpc.ControlServiceStub(channel)


def controller_at(address: str) -> ControllerPlace:
    """The controller at host:port. TANDEM_TOKEN and TANDEM_CERTIFICATES hold what it demands."""
    folder = os.environ.get(CERTIFICATES_VARIABLE, "")
    credentials = channel_credentials(Path(folder)) if folder else None
    return ControllerPlace(address, os.environ.get(TOKEN_VARIABLE, ""), credentials)


def controller_of(folder: Path) -> ControllerPlace | None:
    """The controller of the run in a folder: its supervisor, or a service that has registered in the Redis of its
    recipe. None if neither runs. Raises EnvironmentLackError if that Redis does not answer.
    """
    recipe = load_resolved(folder / CONFIG_FILE)
    name = recipe.run.server_name
    if place := running(folder):
        credentials = channel_credentials(Path(place.certificates), "service") if place.certificates else None
        return ControllerPlace(place.control, place.token, credentials, name)
    url = external_redis_url(recipe)
    if not url:
        return None
    with redis_required():
        buffer = Buffer(url, recipe.run.run_id, connect_timeout_seconds=_REDIS_SECONDS)
        with closing(buffer):
            address = buffer.services().get("controller", "")
            if not address or not Orders(buffer.connection).has_controller():
                return None
            token = run_token(buffer.secret(), Role.operate)
    credentials = channel_credentials(Path(recipe.run.certificates), "service") if recipe.run.certificates else None
    return ControllerPlace(address, token, credentials, name)


def controller_required(folder: Path) -> ControllerPlace:
    """As `controller_of`. Raises EnvironmentLackError if no controller runs."""
    if place := controller_of(folder):
        return place
    remedy = f"go on with the run by `{resume_command(folder)}`, or name its controller by --address"
    raise EnvironmentLackError(f"{folder}: no run is running there; {remedy}")
