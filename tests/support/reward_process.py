"""`tandem reward serve` as a process that can be killed and restarted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.services.process import dying_with_parent
from tests.support.paths import ROOT

STOP_SECONDS = 20.0


class RewardProcess:
    """A service, which starts its own Redis in `folder` if no URL is given. Clients take a restart on the same port as
    the same service.
    """

    def __init__(self, folder: Path, *overrides: str, redis_url: str = "", name: str = "one", port: int = 0) -> None:
        place = ["--folder", str(folder), "--redis-url", redis_url, "--name", name, "--port", str(port)]
        self.process = subprocess.Popen(
            dying_with_parent([sys.executable, "-m", "tandem.services.cli", "reward", "serve", *overrides, *place]),
            env={**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": ""},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        line = next((line for line in self.process.stdout if "listens on " in line), "")
        assert line, f"it ended: {self.process.wait(10)}"
        self.address = line.split()[-1]
        self.port = int(self.address.rpartition(":")[2])
        # A full pipe would block the service.
        threading.Thread(target=self.process.stdout.read, daemon=True).start()

    def kill(self) -> None:
        """Kills the process as `kill -9` does."""
        self.process.kill()
        self.process.wait(STOP_SECONDS)

    def terminate(self) -> int:
        """Stops the process with SIGTERM and returns its exit code."""
        self.process.terminate()
        return self.process.wait(STOP_SECONDS)


@contextmanager
def running_reward(folder: Path | None = None, *overrides: str) -> Iterator[str]:
    """The address of a service while the block runs. It must end well."""
    with tempfile.TemporaryDirectory() as temporary:
        process = RewardProcess(folder or Path(temporary), *overrides)
        try:
            yield process.address
        finally:
            try:
                assert process.terminate() == 0
            finally:
                process.kill()
