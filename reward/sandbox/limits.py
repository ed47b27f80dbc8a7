"""Limits of one run in a sandbox, and its outcome."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

Failure = Literal["", "error", "time", "memory", "output"]

Stop = Literal["", "time", "output", "asked"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run. The size of the working folder is a property of the sandbox."""

    cpu_seconds: float = 10.0
    """CPU time of the program, which does not depend on the load of the machine."""
    wall_seconds: float = 25.0
    """Wall-clock time, for programs that wait instead of computing."""
    memory_bytes: int = 1 << 30
    """Address space of each process."""
    processes: int = 1
    """Maximum number of processes. With 1 and seccomp, a program cannot start another, which also bounds its memory."""
    threads: int = 64
    open_files: int = 64
    file_bytes: int = 16 << 20
    """Size of each file that the program writes."""
    output_bytes: int = 16 << 20
    """Size of the program's output."""

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run. Only `stdout` and `stderr` come from the program; the rest is observed from outside."""

    exit_code: int
    """If negative, the signal that ended the program."""
    stopped: Stop
    """The limit that the program exceeded. `asked`: the scorer stopped it."""
    stdout: bytes
    stderr: bytes
    """The last bytes of standard error."""
    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    """Peak memory, including the interpreter."""

    @property
    def killed(self) -> bool:
        """Whether the program was killed, but not for a limit: by the kernel for lack of memory, or by itself."""
        return not self.stopped and self.exit_code == -_SIGKILL

    @property
    def failure(self) -> Failure:
        """What went wrong; "" if nothing did. `memory` is inferred from the last line on standard error."""
        if self.stopped in ("time", "output"):
            return self.stopped  # type: ignore[return-value]
        if self.exit_code == 0 or self.stopped == "asked":
            return ""
        if self.exit_code == -_SIGXCPU:
            return "time"
        last_line = self.stderr.strip().rpartition(b"\n")[2]
        if self.killed or b"MemoryError" in last_line.partition(b":")[0]:
            return "memory"
        return "error"


_SIGKILL, _SIGXCPU = 9, 24
