"""Reports of every service: the reply to Info, and its figures in the registry."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from tandem.protos import common_pb2
from tandem.protos.errors import TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.process import Repeated

log = logging.getLogger(__name__)

_HEARTBEAT_SECONDS = 1.0


def software_version() -> str:
    """Tandem's installed version, or `source` in a checkout that is not installed."""
    try:
        return version("tandem-rl")
    except PackageNotFoundError:
        return "source"


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
            figures={**counts, **self.figures()},
            activity=self.activity(),
        )


class Heartbeat(Repeated):
    """Context manager: writes the figures of a service to the registry every second until it is left."""

    def __init__(self, buffer: Buffer, name: str, figures: Callable[[], Mapping[str, float]]) -> None:
        super().__init__("heartbeat", _HEARTBEAT_SECONDS, self._try_to_send)
        self._buffer = buffer
        self._name = name
        self._figures = figures
        self._lock = threading.Lock()
        self._missed = False

    def send(self) -> None:
        """Writes the figures now. Raises UnavailableError if Redis is unreachable."""
        with self._lock:  # reads and writes under one lock, so that older figures never replace newer ones
            self._buffer.heartbeat(self._name, self._figures())

    def _try_to_send(self) -> None:
        try:
            self.send()
            self._missed = False
        except TandemError as error:  # the main loop decides whether the outage is permanent
            if not self._missed:
                log.warning("heartbeat missed: %s", error)
            self._missed = True
