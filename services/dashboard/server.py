"""Serves the dashboard until a signal."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from tandem.protos.errors import EnvironmentLackError
from tandem.services.addresses import is_unspecified
from tandem.services.process import in_thread, stop_event
from tandem.services.rpc.certificates import server_credentials
from tandem.services.rpc.server import check_exposure

REQUEST_SECONDS = 10.0
_MOST_CONNECTIONS = 256
_STOP_SECONDS = 2
_POLL_SECONDS = 0.2


class Impatient(H11Protocol):
    """Closes a connection whose first request does not arrive in time."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(REQUEST_SECONDS, self._close_if_silent)

    def _close_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.close()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises EnvironmentLackError if the port is in use or the address is not this machine's."""
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
        one = socket.socket(family, kind, protocol)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(place)
        one.listen()
    except OSError as error:
        raise EnvironmentLackError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another --port or --host"
        ) from None
    return one


def check_access(host: str, certificates: Path | None, *, insecure: bool) -> str:
    """What an address other than loopback exposes, "" if nothing. Raises ConfigError if that was not allowed, or the
    certificate cannot be used.
    """
    if certificates is not None:  # checks the files
        server_credentials(certificates, "" if is_unspecified(host) else host, client_certificates=False)
    return check_exposure(host, tls=certificates is not None, tokens=True, insecure=insecure)


def serve(app: ASGIApp, listening: socket.socket, certificates: Path | None) -> None:
    """Serves until SIGTERM or Ctrl-C."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        lifespan="off",
        http=Impatient,
        ws="none",
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=_STOP_SECONDS,
        ssl_certfile=None if certificates is None else certificates / "service.crt",
        ssl_keyfile=None if certificates is None else certificates / "service.key",
    )
    server, stop = uvicorn.Server(config), stop_event()
    # In a thread, for in the main thread uvicorn would end the process by the signal that stopped it.
    served = in_thread("uvicorn", server.run, [listening])
    while not served.done() and not stop.wait(_POLL_SECONDS):
        pass
    server.should_exit = True
    served.result(timeout=2 * _STOP_SECONDS)
