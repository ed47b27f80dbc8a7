"""Reports of every service: the reply to Info, its figures in the registry, and the gRPC server that answers."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Unpack

from tandem.protos import common_pb2
from tandem.protos.errors import TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.rpc.server import ServerOptions, ServerThread
from tandem.services.run.control import software_version

log = logging.getLogger(__name__)

_HEARTBEAT_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ServiceInfo:
    """Answers Info for one service."""

    name: str
    figures: Callable[[], Mapping[str, float]]
    """Sums since the start of the process."""
    activity: Callable[[], str]
    """One line: what the service does or waits for."""
    buffer: Buffer | None = None
    """Buffer of its run. None: the service belongs to no run."""
    policy_version: Callable[[], int] = lambda: -1  # it has no weights
    incarnation: Callable[[], int] | None = None
    """Incarnation of its weights. None: the buffer's."""
    started_at: float = field(default_factory=time.time)

    def reply(self) -> common_pb2.InfoReply:
        """The current state of the service. Reads the counts of the run from Redis."""
        counts = {} if self.buffer is None else self.buffer.counts()
        return common_pb2.InfoReply(
            service=self.name,
            software_version=software_version(),
            started_at=self.started_at,
            policy_version=self.policy_version(),
            incarnation=counts.get("incarnation", 0) if self.incarnation is None else self.incarnation(),
            run_id="" if self.buffer is None else self.buffer.run_id,
            figures={**{name: float(number) for name, number in counts.items()}, **self.figures()},
            activity=self.activity(),
        )


class Heartbeat:
    """Context manager: writes the figures of a service to the registry every second until it is left."""

    def __init__(self, buffer: Buffer, name: str, figures: Callable[[], Mapping[str, float]]) -> None:
        self._buffer = buffer
        self._name = name
        self._figures = figures
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send_forever, name="heartbeat", daemon=True)

    def __enter__(self) -> Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)

    def send(self) -> None:
        """Writes the figures now. Raises UnavailableError if Redis is unreachable."""
        with self._lock:  # reads and writes under one lock, so that older figures never replace newer ones
            self._buffer.heartbeat(self._name, self._figures())

    def _send_forever(self) -> None:
        missed = False
        while not self._stop.wait(_HEARTBEAT_SECONDS):
            try:
                self.send()
                missed = False
            except TandemError as error:  # the main loop decides whether the outage is permanent
                if not missed:
                    log.warning("heartbeat missed: %s", error)
                missed = True


class ServiceEndpoint:
    """Context manager: listens, registers the service, and sends heartbeats. Its entry raises EnvironmentLackError if
    the port is in use.
    """

    def __init__(self, info: ServiceInfo, host: str, *, port: int = 0, **options: Unpack[ServerOptions]) -> None:
        assert info.buffer is not None, "only a service of a run has a place in a registry"
        self._info = info
        self._buffer = info.buffer
        self._listen = partial(ServerThread, host, port, info=info.reply, **options)
        self._heartbeat = Heartbeat(info.buffer, info.name, info.figures)
        self.address = ""

    def __enter__(self) -> ServiceEndpoint:
        self._server = self._listen()
        self.address = self._server.address
        self._buffer.register_service(self._info.name, self.address)
        self._heartbeat.__enter__()
        log.info("listens on %s", self.address)
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.stop(grace_seconds=0.5)
        self._heartbeat.__exit__()
