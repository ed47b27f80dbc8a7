"""The services of a run as children of its supervisor, wherever they run; and those that are processes here."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tandem.services.process import PARENT_VARIABLE, PROCESS_MARK_VARIABLE
from tandem.services.run.folder import cannot_write
from tandem.services.run.redis_child import RestartPolicy
from tandem.trainer.backend.registry import RANK_VARIABLES

State = Literal["waiting", "starting", "running", "restarting", "draining", "stopped", "failed"]

_EXCEPTION = re.compile(r"\b(?:\w+\.)*\w+(?:Error|Exception)(?:: .+)?$")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The command of a child. `environment` is added to the supervisor's own; output is appended to `log_file`."""

    name: str
    command: tuple[str, ...]
    log_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    withheld: frozenset[str] = frozenset()
    """Variables of the supervisor that the child does not get."""
    start_after: str = ""
    """Name of a child that has to be running before this one starts."""


class Child(ABC):
    """A service of a run, which a process group starts, watches and stops. Only its main thread calls a child."""

    def __init__(self, spec: ChildSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.service = spec.name.partition("-")[0]
        self.state: State = "stopped"
        self.restarts = 0
        self.policy = RestartPolicy()
        self.restart_at = 0.0
        self.started_at = 0.0
        self.drained: Future[None] | None = None
        """Set when the child begins to leave the run; done once it has no work left."""
        self.told_to_stop_at: float | None = None
        self.joined_late = False
        """Whether it was added to a running run, which then goes on without it if it cannot start."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """Pid of the process, 0 if there is none. Safe to call from any thread."""

    @abstractmethod
    def start(self) -> None:
        """Starts the process, out of reach of Ctrl-C. Raises EnvironmentLackError if it cannot write its log."""

    @abstractmethod
    def exit_code(self) -> int | None:
        """The exit code (negative: a signal), once after each start, or None while the process runs. Kills processes
        that it left behind.
        """

    @property
    @abstractmethod
    def alive(self) -> bool:
        """Whether it was started and has not ended."""

    @abstractmethod
    def terminate(self) -> None:
        """Sends SIGTERM to this process only; it stops its own children."""

    @abstractmethod
    def kill(self) -> None:
        """Kills the process and everything it started."""

    @abstractmethod
    def last_lines(self, count: int) -> list[str]:
        """The last non-blank lines that the process wrote to its log since its latest start."""

    def reap(self) -> None:
        """Records the end of a child that was told to stop."""
        if self.exit_code() is not None or not self.alive:
            self.state = "stopped"

    def last_error(self) -> str:
        """The last line of the log that starts with `tandem: `, else the last line."""
        lines = self.last_lines(200)
        errors = [line for line in lines if line.startswith("tandem: ")]
        return (errors or lines or [f"it wrote nothing to {self.spec.log_file}"])[-1].removeprefix("tandem: ")

    def cause(self) -> str:
        """The last line of the log that names an exception, as at the end of a traceback; "" if there is none."""
        found = (_EXCEPTION.search(line) for line in self.last_lines(200) if not line.startswith("tandem: "))
        return ([match.group() for match in found if match] or [""])[-1]


class LocalChild(Child):
    """A process of this machine. It dies with the thread that started it."""

    def __init__(self, spec: ChildSpec, run_token: str) -> None:
        super().__init__(spec)
        self._mark = f"{run_token}:{spec.name}"
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def pid(self) -> int:
        process = self._process
        return process.pid if process is not None else 0

    def start(self) -> None:
        assert self._process is None, f"{self.name} is already running"
        environment = {
            **{name: value for name, value in os.environ.items() if name not in RANK_VARIABLES | self.spec.withheld},
            **self.spec.environment,
            PARENT_VARIABLE: str(os.getpid()),
            PROCESS_MARK_VARIABLE: self._mark,
            "PYTHONUNBUFFERED": "1",
        }
        try:
            self.spec.log_file.parent.mkdir(parents=True, exist_ok=True)
            with open(self.spec.log_file, "ab") as log:
                log.write(f"--- {time.strftime('%F %T')} {' '.join(self.spec.command)}\n".encode())
                log.flush()
                self._log_start = log.tell()
                self._process = subprocess.Popen(
                    self.spec.command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,
                )
        except OSError as error:
            raise cannot_write(self.spec.log_file, error) from None
        self.started_at = time.monotonic()
        self.state = "starting"

    def exit_code(self) -> int | None:
        if self._process is None:
            return None
        code = self._process.poll()
        if code is not None:
            kill_marked(self._mark)
            self._process = None
        return code

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> None:
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        if self.alive:
            os.killpg(self.pid, signal.SIGKILL)
        kill_marked(self._mark)

    def last_lines(self, count: int) -> list[str]:
        try:
            with open(self.spec.log_file, "rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - 16384))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]


def describe_exit(code: int) -> str:
    """`exit code 1`, or `SIGKILL` for -9."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def kill_marked(mark: str) -> list[int]:
    """Kills every process whose environment holds this mark or one below it, `mark:…`; returns their pids."""
    exact = f"{PROCESS_MARK_VARIABLE}={mark}".encode()
    killed = []
    for entry in Path("/proc").glob("[0-9]*"):
        pid = int(entry.name)
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
            if pid != os.getpid() and any(item == exact or item.startswith(exact + b":") for item in environment):
                os.kill(pid, signal.SIGKILL)
                killed.append(pid)
        except OSError:  # the process has ended or belongs to another user
            continue
    return killed
