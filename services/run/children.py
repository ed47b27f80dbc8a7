"""One child process of the supervisor: how it is started, watched, ended, and when it is started again."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tandem.services.run.folder import cannot_write

State = Literal["starting", "running", "restarting", "stopped", "failed"]

PARENT_VARIABLE = "TANDEM_PARENT_PID"
"""Pid of the supervisor; `tandem serve` dies with it (`process.die_with_parent`)."""
LINEAGE_VARIABLE = "TANDEM_LINEAGE"
"""`<run>:<child>`, inherited by everything a child starts: who carries it is ended with the child, in whatever session
it hides.
"""

FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
MOST_DEATHS = 5
STEADY_SECONDS = 120.0


_OTHERS_RANK = frozenset({"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""Left over in the user's shell, these would make the trainer a rank of a world that is not this run's."""

_EXCEPTION = re.compile(r"\b(?:\w+\.)*\w+(?:Error|Exception)(?:: .+)?$")


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to start: `environment` is added to the supervisor's own, stdout and stderr are appended to `log_file`."""

    name: str
    command: tuple[str, ...]
    log_file: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class RestartPolicy:
    """0.5, 1, 2, 4 … s between restarts; after five deaths in a row, no more.

    Deaths are in a row when none of the lives between them lasted two minutes and the run made no progress meanwhile.
    """

    def __init__(self) -> None:
        self.deaths = 0
        self._progress = -1

    def delay(self, lived_seconds: float, progress: int) -> float | None:
        """Seconds to wait before the next start, or None to give up. `progress` is any number that grows while the run
        gets on.
        """
        if lived_seconds >= STEADY_SECONDS or progress > self._progress:
            self.deaths = 0
        self._progress = max(progress, self._progress)
        self.deaths += 1
        if self.deaths >= MOST_DEATHS:
            return None
        return min(FIRST_DELAY_SECONDS * 2.0 ** (self.deaths - 1), LONGEST_DELAY_SECONDS)


class Child:
    """A process that is started again when it dies. Everything happens in the supervisor's main thread:
    the kernel's parent-death signal follows the thread that started the child."""

    def __init__(self, spec: ChildSpec, run_token: str) -> None:
        self.spec = spec
        self.name = spec.name
        self.state: State = "stopped"
        self.restarts = 0
        self.policy = RestartPolicy()
        self.restart_at = 0.0
        self._lineage = f"{run_token}:{spec.name}"
        self._process: subprocess.Popen[bytes] | None = None
        self.started_at = 0.0
        self._log_start = 0

    @property
    def pid(self) -> int:
        """Pid of the process, 0 if there is none. Any thread may ask."""
        process = self._process
        return process.pid if process is not None else 0

    @property
    def lived_seconds(self) -> float:
        return time.monotonic() - self.started_at

    def start(self) -> None:
        """Starts the process in a session of its own: Ctrl-C reaches the supervisor alone, which ends the children in
        order.

        Raises:
            EnvironmentLackError: the log file cannot be written.
        """
        assert self._process is None, f"{self.name} runs already"
        environment = {
            **{name: value for name, value in os.environ.items() if name not in _OTHERS_RANK},
            **self.spec.environment,
            PARENT_VARIABLE: str(os.getpid()),
            LINEAGE_VARIABLE: self._lineage,
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
        """Its exit code once it has ended (negative: the signal that ended it), else None; ends what it left behind."""
        if self._process is None:
            return None
        code = self._process.poll()
        if code is not None:
            end_lineage(self._lineage)
            self._process = None
        return code

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def terminate(self) -> None:
        """Asks it to end. Its own children are its own business: one that is told twice complains in its log."""
        if self.alive:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Ends it and everything it started at once."""
        if self.alive:
            os.killpg(self.pid, signal.SIGKILL)
        end_lineage(self._lineage)

    def reap(self) -> None:
        """Takes note that a child told to end has ended."""
        if self.exit_code() is not None or self._process is None:
            self.state = "stopped"

    def last_lines(self, count: int) -> list[str]:
        """The last lines that this life of the child wrote to its log, blank ones left out."""
        try:
            with open(self.spec.log_file, "rb") as log:
                end = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, end - 16384))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line.rstrip() for line in text.splitlines() if line.strip()][-count:]

    def complaint(self) -> str:
        """The line in which it said why it ended: its last `tandem: …`, else its last line."""
        lines = self.last_lines(200)
        said = [line for line in lines if line.startswith("tandem: ")]
        return (said or lines or [f"it wrote nothing to {self.spec.log_file}"])[-1].removeprefix("tandem: ")

    def cause(self) -> str:
        """The last line but its complaint that names an exception, as a traceback ends with one; empty if none does."""
        found = (_EXCEPTION.search(line) for line in self.last_lines(200) if not line.startswith("tandem: "))
        return ([match.group() for match in found if match] or [""])[-1]


def death_words(code: int) -> str:
    """`exit code 1`, or `SIGKILL` for -9."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def new_run_token() -> str:
    """A token that no other supervisor's children carry."""
    return uuid.uuid4().hex


def end_lineage(lineage: str) -> list[int]:
    """Kills every process whose environment carries this lineage (or one below it); returns their pids."""
    ended = []
    for pid in _carriers(lineage):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
        ended.append(pid)
    return ended


def _carriers(lineage: str) -> Iterator[int]:
    exact = f"{LINEAGE_VARIABLE}={lineage}".encode()
    below = exact + b":"
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it ended meanwhile, or it is another user's
            continue
        if any(item == exact or item.startswith(below) for item in environment):
            yield int(entry.name)
