"""A Redis as an operator sets it up: users from deploy/redis/users.acl, and TLS in front of it."""

from __future__ import annotations

import asyncio
import hashlib
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote

import redis
from anyio.from_thread import start_blocking_portal

from tandem.services.buffer.redis_server import find_redis_server
from tandem.services.process import dying_with_parent
from tests.support.paths import ROOT
from tests.support.waiting import eventually

ACL_FILE = ROOT / "deploy" / "redis" / "users.acl"
ADMIN = "admin"


class LockedRedis(NamedTuple):
    """A server on a unix socket that knows the users of the file, and one who may do everything."""

    socket: Path
    password: str

    def url(self, user: str = "tandem", password: str | None = None, database: int = 1) -> str:
        secret = quote(self.password if password is None else password, safe="")
        return f"unix://{user}:{secret}@{self.socket}?db={database}"

    def admin(self) -> redis.Redis:
        return redis.Redis.from_url(self.url(ADMIN), protocol=2)


@contextmanager
def locked_redis(folder: Path, password: str) -> Iterator[LockedRedis]:
    """Starts the server. `folder`'s path must be short enough for a socket."""
    binary, _ = find_redis_server()
    digest = hashlib.sha256(password.encode()).hexdigest()
    users = ACL_FILE.read_text().replace("PASSWORD_SHA256", digest)
    (folder / "users.acl").write_text(f"{users}user {ADMIN} on #{digest} ~* &* +@all\n")
    made = LockedRedis(folder / "redis.sock", password)
    options = {"port": "0", "unixsocket": str(made.socket), "aclfile": str(folder / "users.acl"), "dir": str(folder)}
    options |= {"appendonly": "yes", "appendfsync": "no", "save": ""}
    command = [str(binary), *(part for name, value in options.items() for part in (f"--{name}", value))]
    with open(folder / "redis.log", "wb") as log:
        process = subprocess.Popen(dying_with_parent(command), stdout=log)
    try:
        eventually(lambda: made.socket.exists() or process.poll() is not None)
        assert process.poll() is None, (folder / "redis.log").read_text()
        yield made
    finally:
        process.kill()
        process.wait(10.0)


@contextmanager
def tls_before(unix_socket: Path, certificates: Path) -> Iterator[int]:
    """The port of a TLS server on 127.0.0.1 that passes everything on to a unix socket, as stunnel does. `certificates`
    is a folder of `tandem certs init`.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "service.crt", certificates / "service.key")

    async def pass_on(outer: asyncio.StreamReader, to_outer: asyncio.StreamWriter) -> None:
        inner, to_inner = await asyncio.open_unix_connection(unix_socket)
        await asyncio.gather(_copy(outer, to_inner), _copy(inner, to_outer))

    async def serve() -> asyncio.Server:
        return await asyncio.start_server(pass_on, "127.0.0.1", 0, ssl=context)

    with start_blocking_portal() as portal:
        server = portal.call(serve)
        try:
            yield server.sockets[0].getsockname()[1]
        finally:
            portal.call(server.close)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            target.write(data)
            await target.drain()
    target.close()
