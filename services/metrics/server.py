"""`GET /metrics` over HTTP/1.1 for Prometheus: for callers with a token, over TLS where the service has certificates.

A caller has a few seconds to send its request and to read the reply. When too many have not sent theirs, the oldest is
closed. One page is made at a time, in a thread of its own; callers that ask meanwhile get the same page.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from http import HTTPStatus
from http.client import HTTPException, parse_headers
from io import BytesIO
from typing import Self

from anyio.from_thread import start_blocking_portal

from tandem.protos.errors import AccessError, AuthenticationError, EnvironmentLackError, TandemError
from tandem.services.process import in_thread
from tandem.services.rpc.tokens import Role, Tokens

log = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_READ_SECONDS = 5.0
_WRITE_SECONDS = 5.0
_PAGE_SECONDS = 10.0
_STOP_SECONDS = 5.0
_MAX_REQUEST_BYTES = 8192
_MAX_READING = 32

Reply = tuple[HTTPStatus, bytes]


class MetricsServer:
    """Context manager: serves the page on a thread of its own. Without `tokens` anybody who can connect may read it.

    Raises EnvironmentLackError if the port is in use or the address is not this machine's.
    """

    def __init__(
        self, host: str, port: int, page: Callable[[], bytes], *, tokens: Tokens | None, tls: ssl.SSLContext | None
    ) -> None:
        self._place = host.strip("[]"), port
        self._page = page
        self._tokens = tokens
        self._tls = tls
        self._making: Future[bytes] | None = None
        self._reading: dict[asyncio.Task[None], None] = {}
        """Connections whose request has not arrived, the oldest first."""
        self._stack = ExitStack()
        self.port = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            portal = stack.enter_context(start_blocking_portal(name="metrics"))
            server = portal.call(self._start)
            stack.callback(lambda: portal.start_task_soon(self._stop, server).result(_STOP_SECONDS))
            self._stack = stack.pop_all()
        self.port = int(server.sockets[0].getsockname()[1])
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    async def _start(self) -> asyncio.Server:
        host, port = self._place
        try:
            return await asyncio.start_server(self._serve, host, port, limit=_MAX_REQUEST_BYTES)
        except OSError as error:
            why = "the port is in use or not this machine's; choose another one"
            raise EnvironmentLackError(f"cannot listen on {host}:{port} for /metrics: {why}") from error

    async def _stop(self, server: asyncio.Server) -> None:
        server.close()
        for task in list(self._reading):
            task.cancel()
        await server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._reading) >= _MAX_READING:
            next(iter(self._reading)).cancel()
        self._reading[task] = None
        try:
            async with asyncio.timeout(_READ_SECONDS):
                if self._tls is not None:
                    await writer.start_tls(self._tls, ssl_handshake_timeout=_READ_SECONDS)
                head = await reader.readuntil(b"\r\n\r\n")
            del self._reading[task]
            status, body = await self._reply(head)
            writer.write(_head(status, body) + body)
            async with asyncio.timeout(_WRITE_SECONDS):
                await writer.drain()
                writer.close()
                await writer.wait_closed()
        except (TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError):
            log.debug("a caller of /metrics sent no request, or did not read the reply")
        finally:
            self._reading.pop(task, None)
            writer.transport.abort()

    async def _reply(self, head: bytes) -> Reply:
        try:
            method, path = _parsed(head, self._tokens)
        except AuthenticationError as error:
            return HTTPStatus.UNAUTHORIZED, str(error).encode()
        except AccessError as error:
            return HTTPStatus.FORBIDDEN, str(error).encode()
        except (ValueError, HTTPException):
            return HTTPStatus.BAD_REQUEST, b""
        if path != "/metrics":
            return HTTPStatus.NOT_FOUND, b""
        if method != "GET":
            return HTTPStatus.METHOD_NOT_ALLOWED, b""
        if self._making is None or self._making.done():
            self._making = in_thread("metrics-page", self._page)
        try:
            async with asyncio.timeout(_PAGE_SECONDS):
                return HTTPStatus.OK, await asyncio.shield(asyncio.wrap_future(self._making))
        except TimeoutError:
            return HTTPStatus.SERVICE_UNAVAILABLE, b"the figures took too long"
        except TandemError as error:
            return HTTPStatus.SERVICE_UNAVAILABLE, str(error).encode()


def _parsed(head: bytes, tokens: Tokens | None) -> tuple[str, str]:
    """Method and path of a request whose token is valid. Raises AuthenticationError, ValueError, HTTPException."""
    line, _, rest = head.partition(b"\r\n")
    headers = parse_headers(BytesIO(rest))
    if tokens is not None:
        tokens.check([(name.lower(), value) for name, value in headers.items()], Role.read)
    method, target, _version = line.decode("ascii").split(" ")
    return method, target.partition("?")[0]


def _head(status: HTTPStatus, body: bytes) -> bytes:
    lines = [
        f"HTTP/1.1 {status.value} {status.phrase}",
        f"Content-Type: {CONTENT_TYPE}",
        f"Content-Length: {len(body)}",
        "Cache-Control: no-store",
        "Connection: close",
    ]
    if status is HTTPStatus.UNAUTHORIZED:
        lines.append("WWW-Authenticate: Bearer")
    return "\r\n".join([*lines, "", ""]).encode()
