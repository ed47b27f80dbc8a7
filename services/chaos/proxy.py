"""Passes the connections of a run on to its Redis, and cuts or slows those of one service."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from tandem.protos.errors import EnvironmentLackError

_CHUNK_BYTES = 1 << 16
_CONNECT_SECONDS = 5.0
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid


def check_passable(redis_url: str) -> None:
    """Raises EnvironmentLackError for a Redis behind TLS, whose name the proxy cannot have."""
    if urlsplit(redis_url).scheme not in ("redis", "unix"):
        raise EnvironmentLackError(
            "the run's Redis is reached by TLS, which cannot be passed on; leave out cut and slow"
        )


class RedisProxy(AbstractContextManager["RedisProxy"]):
    """Listens on a unix socket, which the folder it is in has to keep from other users, for Redis asks those who come
    by its own socket for nothing. `service_of` names the service of a process.
    """

    def __init__(self, file: Path, redis_url: str, service_of: Callable[[int], str]) -> None:
        self._redis_url = redis_url
        self._service_of = service_of
        self._lock = threading.Lock()
        self._connections: set[_Connection] = set()
        self._cut: set[str] = set()
        self._delays: dict[str, float] = {}
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(file))
        self._listener.listen(128)
        self.url = _behind(redis_url, file)
        threading.Thread(target=self._accept, name="redis-proxy", daemon=True).start()

    def __exit__(self, *_exception: object) -> None:
        with suppress(OSError):  # it wakes the thread that accepts
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            connections = list(self._connections)
        for connection in connections:
            connection.close()

    def cut(self, service: str) -> None:
        """Ends the service's connections and refuses new ones, until `restore`."""
        with self._lock:
            self._cut.add(service)
            cut = [connection for connection in self._connections if connection.service == service]
        for connection in cut:
            connection.close()

    def slow(self, service: str, delay_seconds: float) -> None:
        """Delays everything that the service's connections carry, in each direction, until `restore`."""
        self._delays[service] = delay_seconds

    def restore(self, service: str) -> None:
        self._cut.discard(service)
        self._delays.pop(service, None)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(client,), name="redis-proxy", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        service = self._service_of(_CREDENTIALS.unpack(credentials)[0])
        connection = _Connection(service, client)
        with self._lock:
            refused = service in self._cut
            if not refused:
                self._connections.add(connection)
        try:
            if not refused:
                connection.carry(_connected(self._redis_url), lambda: self._delays.get(service, 0.0))
        except OSError:  # Redis is away, or one side has ended the connection
            pass
        finally:
            connection.close()
            with self._lock:
                self._connections.discard(connection)


class _Connection:
    """One client and its connection to Redis."""

    def __init__(self, service: str, client: socket.socket) -> None:
        self.service = service
        self._ends = [client]

    def carry(self, redis: socket.socket, delay: Callable[[], float]) -> None:
        """Carries bytes both ways until one side ends the connection."""
        client = self._ends[0]
        self._ends.append(redis)
        back = threading.Thread(target=self._copy, args=(redis, client, delay), name="redis-proxy", daemon=True)
        back.start()
        self._copy(client, redis, delay)
        back.join()

    def _copy(self, source: socket.socket, sink: socket.socket, delay: Callable[[], float]) -> None:
        """Carries bytes one way. Then the other side must learn that the connection is over."""
        with suppress(OSError):  # closed by the other direction, or broken by its peer
            while chunk := source.recv(_CHUNK_BYTES):
                if seconds := delay():
                    time.sleep(seconds)
                sink.sendall(chunk)
        self.close()

    def close(self) -> None:
        """May be called twice, and by any thread."""
        for end in self._ends:
            with suppress(OSError):  # the other side was faster
                end.shutdown(socket.SHUT_RDWR)  # it wakes the thread that reads
            end.close()


def _connected(redis_url: str) -> socket.socket:
    place = urlsplit(redis_url)
    if place.scheme == "unix":
        redis = socket.socket(socket.AF_UNIX)
        redis.connect(unquote(place.path))
        return redis
    redis = socket.create_connection((place.hostname or "localhost", place.port or 6379), _CONNECT_SECONDS)
    redis.settimeout(None)
    redis.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return redis


def _behind(redis_url: str, file: Path) -> str:
    """The URL of the same database through the proxy, with the same user and password."""
    place = urlsplit(redis_url)
    query, credentials = place.query, place.netloc.rpartition("@")[0]
    if place.scheme == "redis" and place.path.strip("/"):
        query = "&".join(filter(None, (f"db={place.path.strip('/')}", query)))
    return f"unix://{credentials}{'@' if credentials else ''}{quote(str(file))}{'?' if query else ''}{query}"
