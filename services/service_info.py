"""Reports of every service: the reply to Info, and its figures in the registry."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version

import psutil

from tandem.protos import common_pb2
from tandem.protos.errors import TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.process import Repeated

log = logging.getLogger(__name__)

RESUME_SECONDS = 60.0
"""How long a service that starts in a run that has ended waits for somebody to resume the run."""
_HEARTBEAT_SECONDS = 1.0
_CHILDREN_SECONDS = 10.0


def software_version() -> str:
    """Tandem's installed version, or `source` in a checkout that is not installed."""
    try:
        return version("tandem-rl")
    except PackageNotFoundError:
        return "source"


def cpu_seconds() -> float:
    """CPU time of this process and of all that it started, since it began. What a killed child had used may be lost,
    and a new one may count some seconds late.
    """
    seconds: float = sum(psutil.Process().cpu_times()[:4])  # user and system time, its own and of children that ended
    for child in _children(int(time.monotonic() / _CHILDREN_SECONDS)):
        with suppress(psutil.NoSuchProcess):
            seconds += sum(child.cpu_times()[:4]) if child.is_running() else 0.0
    return seconds


@lru_cache(maxsize=1)
def _children(period: int) -> Sequence[psutil.Process]:
    """The processes below this one at some time in a period. Finding them reads the state of every process of the
    machine, which takes milliseconds.
    """
    return psutil.Process().children(recursive=True)


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
            figures={**counts, **self.totals()},
            activity=self.activity(),
        )

    def totals(self) -> dict[str, float]:
        """The service's own figures, and its CPU time."""
        return {**self.figures(), "cpu_seconds": cpu_seconds()}


class Heartbeat(Repeated):
    """Context manager: reports to the registry every second what a service of a run does, until it is left.

    Sets `stop` once the run has ended, or a later start has the service's name. If the run had ended before the service
    started, the service first waits `RESUME_SECONDS` for the feed, which may be starting to resume the run.
    """

    def __init__(self, info: ServiceInfo, stop: threading.Event) -> None:
        super().__init__("heartbeat", _HEARTBEAT_SECONDS, self._try_to_send)
        assert info.buffer is not None, "only a service of a run has a place in a registry"
        self._buffer = info.buffer
        self._info = info
        self._stop = stop
        self._lock = threading.Lock()
        self._missed = False
        self._cpu_seconds = cpu_seconds()  # not in `send`, because it visits every process of the machine
        self._sent_at = -math.inf
        self._may_end_at = time.monotonic() + RESUME_SECONDS
        self.told_to_leave = False
        """Whether this sampler is to finish its groups and leave the run for good."""

    def send(self) -> None:
        """Reports now; CPU time is that of the last heartbeat. Raises UnavailableError if Redis is unreachable.

        Calls that wait for one another share a report: one that began after a call reports for it.
        """
        called_at = time.monotonic()
        with self._lock:  # reads and writes under one lock, so that older figures never replace newer ones
            if self._sent_at > called_at:
                return
            began_at = time.monotonic()
            figures = {**self._info.figures(), "cpu_seconds": self._cpu_seconds}
            told = self._buffer.heartbeat(self._info.name, figures, self._info.activity())
            self._sent_at = began_at
        self.told_to_leave = told == "left"
        if not told:
            self._may_end_at = 0.0
        elif told == "replaced":
            if not self._stop.is_set():
                log.warning("another process has started as %s; this one ends", self._info.name)
            self._stop.set()
        elif told != "left" and time.monotonic() >= self._may_end_at and not self._stop.is_set():
            log.info("the run is %s; this service ends", told)
            self._stop.set()

    def _try_to_send(self) -> None:
        self._cpu_seconds = cpu_seconds()
        try:
            self.send()
            self._missed = False
        except TandemError as error:  # the main loop decides whether the outage is permanent
            if not self._missed:
                log.warning("heartbeat missed: %s", error)
            self._missed = True
