"""The embedded Redis as a child process, and the rule by which processes that died are restarted."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from tandem.protos.errors import EnvironmentLackError, UnavailableError
from tandem.services.buffer.redis_server import EmbeddedRedis, start_redis
from tandem.services.run.folder import disk_full

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
MOST_DEATHS = 5
STEADY_SECONDS = 120.0
REDIS_STOP_SECONDS = 1.5
SILENT_SECONDS = 60.0
"""What lives but has been silent for so long is killed and restarted."""


class RestartPolicy:
    """Waits 0.5, 1, 2 and 4 s before restarts; gives up after five failures without progress or two steady minutes."""

    def __init__(self) -> None:
        self.deaths = 0
        self._progress = -1

    def delay(self, lived_seconds: float, progress: int) -> float | None:
        """Seconds to wait before the next start, or None to give up. `progress` grows as the run advances."""
        if lived_seconds >= STEADY_SECONDS or progress > self._progress:
            self.deaths = 0
        self._progress = max(progress, self._progress)
        self.deaths += 1
        if self.deaths >= MOST_DEATHS:
            return None
        return min(FIRST_DELAY_SECONDS * 2.0 ** (self.deaths - 1), LONGEST_DELAY_SECONDS)


class RedisChild(AbstractContextManager["RedisChild"]):
    """Context manager: the embedded Redis of a local run, restarted from its append-only file when it dies or hangs.

    `progress` grows as its users advance, as in `RestartPolicy.delay`. `silence`: seconds since it answered a user.
    """

    def __init__(
        self,
        folder: Path,
        *,
        report: Callable[[str], None],
        progress: Callable[[], int] = lambda: 0,
        silence: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._folder = folder
        self._report = report
        self._progress = progress
        self._silence = silence
        self._policy = RestartPolicy()
        self._killed: EmbeddedRedis | None = None
        self._restart_at: float | None = None
        """Monotonic time at which a dead server is started again."""
        self._fault = ""
        """Why the last start failed."""
        self._start()

    @property
    def url(self) -> str:
        return self._server.url

    def __exit__(self, *_exception: object) -> None:
        self._server.stop(REDIS_STOP_SECONDS)

    def restart_if_dead(self) -> None:
        """Restarts a server that died or hangs, at a later call after its delay. One that ends as it starts has died
        again. Raises EnvironmentLackError on a full disk, UnavailableError at the fifth death in a row.
        """
        if self._server.alive and not self._hangs():
            return
        if self._restart_at is None:
            self._restart_at = time.monotonic() + self._delay()
        if time.monotonic() < self._restart_at:
            return
        self._restart_at = None
        url = self.url
        self._server.stop()
        try:
            self._start()
        except EnvironmentLackError as error:
            self._fault = f" ({error})"
            self._report(str(error))
            return
        assert self.url == url, "the services know Redis by its first address"

    def _hangs(self) -> bool:
        """Kills a server that nobody has had an answer from for `SILENT_SECONDS`, and that does not answer now. Returns
        whether it has ended.
        """
        silence = min(self._silence(), time.monotonic() - self._started_at)
        if silence < SILENT_SECONDS or self._server.answers():
            return False
        if self._killed is not self._server:
            self._killed = self._server
            self._report(f"Redis has not answered for {SILENT_SECONDS:.0f} s; it is killed")
            self._server.kill()
        return not self._server.alive

    def _delay(self) -> float:
        if disk_full(self._folder):
            remedy = "free space there, then start again (a run with --resume)"
            raise EnvironmentLackError(f"Redis ended: the disk of {self._folder} is full; {remedy}")
        delay = self._policy.delay(time.monotonic() - self._started_at, self._progress())
        if delay is None:
            often = f"Redis died {self._policy.deaths} times in a row without progress"
            raise UnavailableError(f"{often}{self._fault}; see {self._folder / 'logs' / 'redis.log'}")
        self._report(f"Redis died; restarting it from its append-only file in {delay:g} s")
        return delay

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._server = start_redis(self._folder)
        self._fault = ""
