"""Where and how the services of a run listen and call each other: addresses, tokens, TLS."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Unpack

import grpc

from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.rpc.certificates import channel_credentials, server_credentials
from tandem.services.rpc.server import Security, ServerOptions, ServerThread, check_exposure
from tandem.services.rpc.tokens import Tokens
from tandem.services.service_info import Heartbeat, ServiceInfo

log = logging.getLogger(__name__)


def check_network(recipe: Recipe) -> None:
    """Raises ConfigError if the certificates cannot be used on `run.host`, or are missing on a public one."""
    run = recipe.run
    check_exposure(run.host, tls=bool(run.certificates), tokens=True, insecure=run.insecure)
    _server_credentials(recipe)
    calling_credentials(recipe)


def server_security(recipe: Recipe, buffer: Buffer) -> Security:
    """What every server of the run demands of its callers. Raises ConfigError as `check_network`."""
    return {
        "tokens": Tokens.of_run(buffer.secret()),
        "credentials": _server_credentials(recipe),
        "insecure": recipe.run.insecure,
    }


def calling_credentials(recipe: Recipe) -> grpc.ChannelCredentials | None:
    """Credentials with which a service of the run calls another one; None without `run.certificates`."""
    folder = recipe.run.certificates
    return channel_credentials(Path(folder), "service") if folder else None


def _server_credentials(recipe: Recipe) -> grpc.ServerCredentials | None:
    folder = recipe.run.certificates
    return server_credentials(Path(folder), recipe.run.host, client_certificates=True) if folder else None


@contextmanager
def service_endpoint(
    info: ServiceInfo, recipe: Recipe, *, port: int = 0, **options: Unpack[ServerOptions]
) -> Iterator[str]:
    """Listens, registers the service of a run and sends its heartbeats; yields the address. Raises EnvironmentLackError
    if the port is in use.
    """
    assert info.buffer is not None, "only a service of a run has a place in a registry"
    options = {**options, **server_security(recipe, info.buffer)}
    server = ServerThread(recipe.run.host, port, info=info.reply, **options)
    try:
        info.buffer.register_service(info.name, server.address)
        with Heartbeat(info.buffer, info.name, info.figures):
            log.info("listens on %s", server.address)
            yield server.address
    finally:
        server.stop(grace_seconds=0.5)
