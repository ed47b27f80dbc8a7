"""`tandem reward serve` as a process that can be killed and restarted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.paths import ROOT

STOP_SECONDS = 20.0


class RewardProcess:
    """A service with its embedded Redis in `folder`. Clients take a restart on the same port as the same service."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tandem.services.cli", "reward", "serve", "--port", str(port), "--name", "a"],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": ""},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()  # bounded by the test's timeout
        assert line.startswith("reward: listens on "), line
        self.address = line.split()[-1]
        self.port = int(self.address.rpartition(":")[2])

    def kill(self) -> None:
        """Kills the process as `kill -9` does."""
        self._process.kill()
        self._process.wait(STOP_SECONDS)

    def stop(self) -> None:
        """Stops the process as Ctrl-C does, or by SIGKILL if that takes too long."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()


@contextmanager
def running_reward() -> Iterator[str]:
    """The address of a service while the block runs."""
    with tempfile.TemporaryDirectory() as folder:
        process = RewardProcess(Path(folder))
        try:
            yield process.address
        finally:
            process.stop()
