"""Numbers of the replicas of a service that were started without one: the smallest that nobody holds. A launcher gives
numbers to those that it starts; they are held, too, where others may be started by hand.

A number is held under a lease in Redis, which the process renews every second. A process that ends gives it back. After
a kill it is free once the lease has expired; a process on a host of the same name, such as the same container started
again, waits for that and takes the number over.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import count
from typing import cast

from tandem.protos.errors import TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.connection import milliseconds
from tandem.services.process import Repeated

log = logging.getLogger(__name__)

LEASE_SECONDS = 6.0
_RENEWAL_SECONDS = 1.0
_POLL_SECONDS = 0.1
_REDIS_SECONDS = 2.0


def replica_name(service: str, number: int) -> str:
    """The name in the registry. A reward service usually has no replicas: the first one is `reward`."""
    return service if service == "reward" and number == 0 else f"{service}-{number}"


@contextmanager
def free_replica_number(redis_url: str, run_id: str, service: str) -> Iterator[int]:
    """Holds the smallest free number of the service until the block is left. Ends the process if another one holds the
    number in the meantime, because this one could not renew it. Raises UnavailableError if Redis is unreachable.
    """
    holder, leaves = _this_process(), threading.Event()
    with _connected(redis_url, run_id, leaves) as buffer:
        number = _take(buffer, service, holder)
        with _held(buffer, replica_name(service, number), holder, leaves):
            yield number


@contextmanager
def given_replica_number(redis_url: str, run_id: str, service: str, number: int) -> Iterator[None]:
    """Holds a number that a launcher gave until the block is left, from the start on: the launcher knows that the
    process that had it before has ended. Ends the process and raises as `free_replica_number`.
    """
    name, holder, leaves = replica_name(service, number), _this_process(), threading.Event()
    with _connected(redis_url, run_id, leaves) as buffer:
        redis, lease_ms = buffer.connection.redis, milliseconds(LEASE_SECONDS)
        buffer.connection.retried(lambda: redis.set(_key(buffer, name), holder, px=lease_ms))
        with _held(buffer, name, holder, leaves):
            yield


def _connected(redis_url: str, run_id: str, leaves: threading.Event) -> closing[Buffer]:
    return closing(Buffer(redis_url, run_id, connect_timeout_seconds=_REDIS_SECONDS, stop=leaves))


@contextmanager
def _held(buffer: Buffer, name: str, holder: str, leaves: threading.Event) -> Iterator[None]:
    """Renews the lease until the block is left, and then gives it back, unless Redis is away: then it expires."""
    try:
        with Repeated(f"number-{name}", _RENEWAL_SECONDS, lambda: _renew(buffer, name, holder)):
            try:
                yield
            finally:
                leaves.set()
    finally:
        with suppress(TandemError):
            if _holder(buffer, name) == holder:
                buffer.connection.retried(lambda: buffer.connection.redis.delete(_key(buffer, name)))


def _this_process() -> str:
    return json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()})


def _take(buffer: Buffer, service: str, holder: str) -> int:
    deadline = time.monotonic() + LEASE_SECONDS + _RENEWAL_SECONDS
    own_host = json.loads(holder)["host"]
    while True:
        for number in count():
            name = replica_name(service, number)
            if _hold(buffer, name, holder, new=True):
                return number
            other = _holder(buffer, name)
            if not other or (json.loads(other)["host"] == own_host and time.monotonic() < deadline):
                break  # it has just expired, or may be that of an earlier process on this host
        time.sleep(_POLL_SECONDS)


def _renew(buffer: Buffer, name: str, holder: str) -> None:
    try:
        held = _hold(buffer, name, holder, new=_holder(buffer, name) != holder)
    except TandemError:
        return  # the main loop decides whether the outage is permanent
    if not held:
        log.error("another process has become %s, for this one did not renew its lease in time", name)
        os._exit(1)


def _hold(buffer: Buffer, name: str, holder: str, *, new: bool) -> bool:
    redis, key, lease_ms = buffer.connection.redis, _key(buffer, name), milliseconds(LEASE_SECONDS)
    return bool(buffer.connection.retried(lambda: redis.set(key, holder, px=lease_ms, nx=new, xx=not new)))


def _holder(buffer: Buffer, name: str) -> str:
    redis, key = buffer.connection.redis, _key(buffer, name)
    return cast("bytes", buffer.connection.retried(lambda: redis.get(key)) or b"").decode()


def _key(buffer: Buffer, name: str) -> str:
    return buffer.connection.key(f"number:{name}")
