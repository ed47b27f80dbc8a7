"""The processes of a run: `tandem run` as a child, and those of each service below it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import psutil

from tandem.services.chaos.schedule import SUPERVISOR
from tandem.services.process import PROCESS_MARK_VARIABLE, dying_with_parent
from tandem.services.run.folder import CONFIG_FILE

STOP_SECONDS = 15.0
"""A supervisor ends within 10 s of Ctrl-C."""


class Supervisor(AbstractContextManager["Supervisor"]):
    """`tandem run` on a recipe, in a process that ends with this one. What it prints goes to `log_file`."""

    def __init__(self, arguments: Sequence[str], folder: Path, redis_url: str, log_file: Path) -> None:
        self._folder = folder
        self._environment = {**os.environ, "TANDEM_REDIS_URL": redis_url}
        self._log_file = log_file
        self._log_start = 0
        self._process = self._start(*arguments)

    @property
    def pid(self) -> int:
        return self._process.pid

    def exit_code(self) -> int | None:
        return self._process.poll()

    def resume(self) -> None:
        """Goes on with the run, whose supervisor has ended."""
        self._process = self._start(str(self._folder / CONFIG_FILE), "--resume")

    def __exit__(self, *_exception: object) -> None:
        """Stops the run if it still goes on, as Ctrl-C does."""
        self.send(signal.SIGCONT)
        self.send(signal.SIGINT)
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(STOP_SECONDS)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to `tandem run` itself."""
        self._process.send_signal(number)

    def last_lines(self, count: int) -> list[str]:
        """The last non-blank lines that `tandem run` has printed since its latest start."""
        text = self._log_file.read_bytes()[self._log_start :].decode(errors="replace")
        return [line for line in text.splitlines() if line.strip()][-count:]

    def _start(self, *arguments: str) -> subprocess.Popen[bytes]:
        command = dying_with_parent([sys.executable, "-m", "tandem.services.cli", "run", *arguments])
        with open(self._log_file, "ab") as log:
            self._log_start = log.tell()
            return subprocess.Popen(
                command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C comes from `__exit__`, once stopped processes go on
            )

    def processes_of(self, service: str) -> list[psutil.Process]:
        """The living processes of a service: its own one first, then those below it."""
        return [process for process in self.processes() if service_of(process.pid) == service]

    def processes(self) -> list[psutil.Process]:
        """All that live below `tandem run`."""
        with suppress(psutil.NoSuchProcess):
            return [one for one in psutil.Process(self.pid).children(recursive=True) if is_alive(one)]
        return []


def is_alive(process: psutil.Process) -> bool:
    """Whether this process, and not another one with its pid, has not ended."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def service_of(pid: int) -> str:
    """The service that a process belongs to, by the mark in its environment; `supervisor` without a mark."""
    with suppress(OSError):
        for item in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
            name, _, mark = item.decode(errors="replace").partition("=")
            if name == PROCESS_MARK_VARIABLE:
                return mark.split(":")[1]
    return SUPERVISOR
