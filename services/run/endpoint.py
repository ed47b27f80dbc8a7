"""Where and how the services of a run listen and call each other: addresses, tokens, TLS."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Unpack, cast
from urllib.parse import urlsplit

import grpc

from tandem.protos.errors import ConfigError
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.metrics.names import Figures, Source
from tandem.services.metrics.page import Sources, page_of
from tandem.services.metrics.ports import metrics_port
from tandem.services.metrics.server import MetricsServer
from tandem.services.metrics.tracing import flush_spans
from tandem.services.rpc.certificates import channel_credentials, http_context, server_credentials
from tandem.services.rpc.server import Security, ServerOptions, ServerThread, check_exposure
from tandem.services.rpc.tokens import Tokens
from tandem.services.service_info import Heartbeat, ServiceInfo, cpu_seconds

log = logging.getLogger(__name__)

AUTO_HOST = "auto"


def check_network(recipe: Recipe) -> None:
    """Raises ConfigError if the certificates cannot be used on `run.host`, or are missing on a public one."""
    run = recipe.run
    check_exposure(run.host, tls=bool(run.certificates), tokens=True, insecure=run.insecure)
    _server_credentials(recipe)
    calling_credentials(recipe)


def run_buffer(recipe: Recipe, redis_url: str, stop: threading.Event) -> Buffer:
    """The buffer of the run for one of its services, which waits for an outage of Redis until it is told to stop."""
    return Buffer(redis_url, recipe.run.run_id, outage_seconds=recipe.run.redis_outage_seconds, stop=stop)


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
    folder, name = recipe.run.certificates, recipe.run.server_name or recipe.run.host
    return server_credentials(Path(folder), name, client_certificates=True) if folder else None


def with_own_host(recipe: Recipe, redis_url: str) -> Recipe:
    """The recipe with this machine's address for `run.host = "auto"`: that from which it reaches Redis, or loopback if
    Redis listens on a unix socket. Raises ConfigError if Redis' host is unknown.
    """
    if recipe.run.host != AUTO_HOST:
        return recipe
    place = urlsplit(redis_url)
    host = "127.0.0.1"
    if place.hostname:
        try:
            kind, _, _, _, target = socket.getaddrinfo(place.hostname, place.port or 6379, type=socket.SOCK_DGRAM)[0]
            with socket.socket(kind, socket.SOCK_DGRAM) as probe:
                probe.connect(target)  # sends nothing
                host = probe.getsockname()[0]
        except OSError as error:
            raise ConfigError(f"run.host=auto: Redis' host {place.hostname}: {error.strerror or error}") from None
    return recipe.model_copy(update={"run": recipe.run.model_copy(update={"host": host})})


def metrics_endpoint(info: ServiceInfo, recipe: Recipe, more: Sources | None = None) -> AbstractContextManager[object]:
    """Serves the metrics of a service of a run where `run.metrics_port` says so: what it reports, and `more`. Raises
    EnvironmentLackError if the port is in use.
    """
    port = metrics_port(recipe.run.metrics_port, info.name)
    if not port:
        return nullcontext()
    assert info.buffer is not None, "only a service of a run has a run's token"
    run = recipe.run
    page = page_of(run.run_id, info.name, {**reported(info), **(more or {})})
    tokens = Tokens.of_run(info.buffer.secret())
    tls = (
        http_context(Path(run.certificates), run.server_name or run.host, client_certificates=True)
        if run.certificates
        else None
    )
    return MetricsServer(run.host, port, page, tokens=tokens, tls=tls)


def reported(info: ServiceInfo) -> Sources:
    """What the metrics of a service show of its reports."""
    service = cast("Source", info.name.partition("-")[0])

    def of_every_service() -> Figures:
        version = info.policy_version()  # -1: it has no weights
        own = {"started_at": info.started_at, "cpu_seconds": cpu_seconds()}
        return own | ({"policy_version": version} if version >= 0 else {})

    return {"service": of_every_service, service: info.figures}


@contextmanager
def service_endpoint(
    info: ServiceInfo,
    recipe: Recipe,
    stop: threading.Event,
    *,
    port: int = 0,
    more: Sources | None = None,
    **options: Unpack[ServerOptions],
) -> Iterator[str]:
    """Listens, registers the service of a run, sends its heartbeats and serves its metrics; yields the address. Sets
    `stop` once the run has ended. Raises EnvironmentLackError if a port is in use.
    """
    assert info.buffer is not None, "only a service of a run has a place in a registry"
    options = {**options, **server_security(recipe, info.buffer)}
    server = ServerThread(recipe.run.host, port, info=info.reply, **options)
    try:
        info.buffer.register_service(info.name, server.address)
        with Heartbeat(info, stop), metrics_endpoint(info, recipe, more):
            log.info("listens on %s", server.address)
            yield server.address
    finally:
        server.stop(grace_seconds=0.5)
        flush_spans()
