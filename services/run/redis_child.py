"""The embedded Redis of a local run, restarted from its append-only file when it dies."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from tandem.protos.errors import EnvironmentLackError, UnavailableError
from tandem.services.buffer.redis_server import start_redis
from tandem.services.run.children import RestartPolicy
from tandem.services.run.folder import disk_full

STOP_SECONDS = 1.5


class RedisChild:
    """Context manager that runs the server. `restart_if_dead` is called at every poll."""

    def __init__(self, folder: Path, *, report: Callable[[str], None]) -> None:
        self._folder = folder
        self._report = report
        self._policy = RestartPolicy()
        self._start()

    @property
    def url(self) -> str:
        return self._server.url

    def __enter__(self) -> RedisChild:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._server.stop(STOP_SECONDS)

    def restart_if_dead(self) -> None:
        """Restarts a dead server. Raises EnvironmentLackError on a full disk, UnavailableError at the fifth death."""
        if self._server.alive:
            return
        if disk_full(self._folder):
            remedy = "free space there, then start again (a run with --resume)"
            raise EnvironmentLackError(f"Redis ended: the disk of {self._folder} is full; {remedy}")
        delay = self._policy.delay(time.monotonic() - self._started_at, 0)
        if delay is None:
            raise UnavailableError(f"Redis died {self._policy.deaths} times in a row; see {self._folder / 'redis'}")
        self._report("Redis died; restarting it from its append-only file")
        url = self.url
        self._server.stop()
        self._start()
        assert self.url == url, "the services know Redis by its first address"

    def _start(self) -> None:
        self._server = start_redis(self._folder)
        self._started_at = time.monotonic()
