"""The Redis of a run under chaos, which may be killed, stopped, and restarted without its last second."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from contextlib import AbstractContextManager, suppress
from pathlib import Path

from tandem.services.buffer.redis_server import start_redis

LOST_SECONDS = 1.0
"""What a Redis with `appendfsync everysec` loses at most."""
_KEPT_SAMPLES = 100


class OwnRedis(AbstractContextManager["OwnRedis"]):
    """An embedded Redis with its data in the run folder, where `tandem ledger` and `tandem run --resume` find them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._server = start_redis(folder)
        self._sizes: deque[tuple[float, int, int]] = deque(maxlen=_KEPT_SAMPLES)
        """Monotonic time, inode of the append-only file, its bytes."""

    @property
    def url(self) -> str:
        return self._server.url

    @property
    def pid(self) -> int:
        return self._server.pid

    def __exit__(self, *_exception: object) -> None:
        if self._server.alive:
            os.kill(self.pid, signal.SIGCONT)
        self._server.stop()

    def note_size(self) -> None:
        """Notes how long the append-only file is now, for `restart_without_last_second`."""
        with suppress(FileNotFoundError):  # just replaced by a shorter one
            if (file := self._log()) is not None:
                status = file.stat()
                self._sizes.append((time.monotonic(), status.st_ino, status.st_size))

    def restart_if_dead(self) -> None:
        """Restarts a dead server from its append-only file, as the supervisor does with the Redis of its own."""
        if not self._server.alive:
            self._server.stop()
            self._server = start_redis(self._folder)

    def kill(self) -> None:
        if self._server.alive:
            os.kill(self.pid, signal.SIGKILL)

    def restart_without_last_second(self) -> int:
        """Kills the server and restarts it from what its append-only file held a second ago. Returns the bytes lost."""
        self.kill()
        killed_at, file = time.monotonic(), self._log()
        self._server.stop()
        lost = 0
        if file is not None:
            now = file.stat()
            before = (one for one in reversed(self._sizes) if one[0] <= killed_at - LOST_SECONDS)
            kept = next((size for _, inode, size in before if inode == now.st_ino), None)
            if kept is not None:  # else the file has been rewritten since, under the same name
                lost = now.st_size - kept
                os.truncate(file, kept)
        self._sizes.clear()
        self._server = start_redis(self._folder)
        return lost

    def _log(self) -> Path | None:
        """The append-only file that is being written: Redis 7 has several, in a folder."""
        data = self._folder / "redis"
        files = [*data.glob("appendonlydir/*.incr.aof"), *data.glob("appendonly.aof")]
        return max(files, key=lambda file: file.stat().st_mtime_ns, default=None)
