"""The gRPC server of every service, with health, reflection and Info."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypedDict, Unpack, cast

import grpc
from anyio.from_thread import start_blocking_portal
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from tandem.protos import common_pb2, common_pb2_grpc
from tandem.protos.errors import ConfigError, EnvironmentLackError
from tandem.services.addresses import is_loopback
from tandem.services.rpc.limits import MAX_MESSAGE_BYTES, LimitedServer, RpcLimits
from tandem.services.rpc.tokens import Tokens

log = logging.getLogger(__name__)

INFO_SERVICE = "tandem.v1.InfoService"
ADDRESS_FILE_VARIABLE = "TANDEM_ADDRESS_FILE"
"""Environment variable of the file into which a process writes the address of its server, for `tandem health`."""
_START_SECONDS = 10.0
_STOP_SECONDS = 5.0
_IDLE_CONNECTION_SECONDS = 3600  # gRPC's clients print a line when a connection is closed, so not often
_MOST_CONNECTIONS = 1 << 20  # of a process that may open any number of files

_LOG_OF_GRPC = logging.getLogger("grpc._cython.cygrpc")
_CANNOT_REPLY = 'Failed "execute_batch"'

Info = Callable[[], common_pb2.InfoReply]


class _RepliesToNobody(logging.Filter):
    """Logs at level debug, in one line, that a reply could not be sent because the call had ended: the caller left, its
    deadline passed, or its message was too large.

    gRPC means to ignore this, but logs an error with a traceback when it learns of the failed reply before the end of
    the call. What else fails in a call stays an error.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, grpc.aio.InternalError) or not str(error).startswith(_CANNOT_REPLY):
            return True
        log.debug("%s: the call had ended before its reply", record.getMessage())
        return False


_REPLIES_TO_NOBODY = _RepliesToNobody()


class _InfoServicer(common_pb2_grpc.InfoServiceServicer):
    def __init__(self, info: Info) -> None:
        self._info = info

    async def Info(self, request: common_pb2.InfoRequest, context: grpc.aio.ServicerContext) -> common_pb2.InfoReply:
        return await asyncio.to_thread(self._info)  # it may ask Redis for queue figures


class Security(TypedDict, total=False):
    """What a server demands of its callers."""

    tokens: Tokens | None
    """The tokens that callers must have. None: anybody who can connect may call everything."""
    credentials: grpc.ServerCredentials | None
    """Certificate and key. None: no TLS."""
    insecure: bool
    """Listen on addresses other than loopback without TLS or tokens."""


class ServerOptions(Security, total=False):
    """What a server serves besides Info, health and reflection."""

    register: Callable[[grpc.aio.Server], None]
    service_names: Sequence[str]
    on_stop: Callable[[], None]
    """Called on the event loop when the server begins to stop, so that long calls can end with their own error."""
    limits: RpcLimits


@dataclass(frozen=True, slots=True)
class RpcServer:
    """A listening server. `address` is `host:port` with the bound port."""

    address: str
    server: grpc.aio.Server
    health: health.aio.HealthServicer
    on_stop: Callable[[], None]

    async def stop(self, grace_seconds: float = 1.0) -> None:
        """Sets health to NOT_SERVING, refuses new calls, and cancels running ones after the grace period."""
        await self.health.enter_graceful_shutdown()
        self.on_stop()
        await self.server.stop(grace_seconds)


async def start_server(host: str, port: int, *, info: Info, **options: Unpack[ServerOptions]) -> RpcServer:
    """Starts a server with Info, health and reflection. Port 0 picks a free port. Raises EnvironmentLackError if the
    port is in use or the address is not this machine's, ConfigError as `check_exposure`.
    """
    limits, service_names = options.get("limits", RpcLimits()), options.get("service_names", ())
    tokens, credentials = options.get("tokens"), options.get("credentials")
    exposure = check_exposure(
        host, tls=credentials is not None, tokens=tokens is not None, insecure=options.get("insecure", False)
    )
    _LOG_OF_GRPC.addFilter(_REPLIES_TO_NOBODY)  # once a process
    server = grpc.aio.server(options=_options(limits))
    # LimitedServer has the two methods that registration uses.
    registrar = cast("grpc.aio.Server", LimitedServer(server, limits, service_names, tokens))
    common_pb2_grpc.add_InfoServiceServicer_to_server(_InfoServicer(info), registrar)
    if register := options.get("register"):
        register(registrar)
    health_servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(health_servicer, registrar)
    names = [*service_names, INFO_SERVICE]
    shown = [*names, health.SERVICE_NAME, reflection.SERVICE_NAME]
    add_reflection: Callable[[object, object], None] = reflection_pb2_grpc.add_ServerReflectionServicer_to_server
    add_reflection(reflection.aio.ReflectionServicer(shown), registrar)
    try:
        bound = _listen(server, f"{host}:{port}", credentials) if _can_listen(host, port) else 0
    except RuntimeError:
        bound = 0
    if bound == 0:
        why = "the port is in use or not this machine's; choose another port"
        raise EnvironmentLackError(f"cannot listen on {host}:{port}: {why}")
    await server.start()
    if exposure:
        log.warning("listens on %s:%d: %s", host, bound, exposure)
    for name in ("", *names):
        await health_servicer.set(name, health_pb2.HealthCheckResponse.SERVING)
    if file := os.environ.get(ADDRESS_FILE_VARIABLE):
        await asyncio.to_thread(Path(file).write_text, f"{host}:{bound}", encoding="utf-8")
    return RpcServer(f"{host}:{bound}", server, health_servicer, options.get("on_stop", lambda: None))


def _options(limits: RpcLimits) -> list[tuple[str, int]]:
    """Besides these, gRPC ends connections that send too many pings."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # negative: no limit
    most_connections = most_files // 2 if most_files > 0 else _MOST_CONNECTIONS  # calls need files, too
    return [
        ("grpc.max_receive_message_length", limits.most_bytes),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.so_reuseport", 0),  # a port in use must be an error, not a second listener
        ("grpc.max_concurrent_streams", limits.max_calls + 2 * limits.max_streams),  # of one connection
        ("grpc.max_allowed_incoming_connections", most_connections),
        ("grpc.server_handshake_timeout_ms", int(1000 * limits.read_seconds)),
        ("grpc.max_connection_idle_ms", 1000 * _IDLE_CONNECTION_SECONDS),  # clients connect again by themselves
    ]


def check_exposure(host: str, *, tls: bool, tokens: bool, insecure: bool) -> str:
    """What an address other than loopback exposes, "" if nothing. Raises ConfigError if it is not `insecure`."""
    lacks = [what for what, there in (("certificates", tls), ("tokens", tokens)) if not there]
    if not lacks or is_loopback(host):
        return ""
    fault = f"{host} is not a loopback address, and the service has no {' and no '.join(lacks)}"
    if insecure:
        return fault
    made_by = {"certificates": "`tandem certs init` makes certificates", "tokens": "`tandem reward token` makes tokens"}
    made = ", ".join(made_by[one] for one in lacks)
    raise ConfigError(f"{fault}: {made}; or set insecure, if you trust all who can connect")


def _listen(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    if credentials is None:
        return int(server.add_insecure_port(address))
    return int(server.add_secure_port(address, credentials))


def _can_listen(host: str, port: int) -> bool:
    """Whether the address is free. Checked first, because gRPC prints to standard error if it cannot listen."""
    try:
        places = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        return False
    for family, kind, protocol, _, place in places:
        with suppress(OSError), socket.socket(family, kind, protocol) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(place)
            return True
    return False


class ServerThread:
    """A server on an event loop in a thread, for services without an event loop."""

    def __init__(self, host: str, port: int, *, info: Info, **options: Unpack[ServerOptions]) -> None:
        starting = partial(start_server, host, port, info=info, **options)
        with ExitStack() as stack:
            self._portal = stack.enter_context(start_blocking_portal(name="grpc"))
            self._server = self._portal.start_task_soon(starting).result(timeout=_START_SECONDS)
            # Also before the interpreter exits: anyio would wait for a thread that no longer runs.
            self._end_thread = weakref.finalize(self, stack.pop_all().close)
        self.address = self._server.address

    def stop(self, grace_seconds: float = 1.0) -> None:
        if self._end_thread.alive:
            try:
                self._portal.start_task_soon(self._server.stop, grace_seconds).result(grace_seconds + _STOP_SECONDS)
            finally:
                self._end_thread()
