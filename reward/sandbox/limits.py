"""What one run in a sandbox may take, and what became of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

Failure = Literal["", "error", "time", "memory", "output"]

Stop = Literal["", "time", "output", "asked"]


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run. The size of the working folder is the sandbox's, see `SandboxPool`."""

    cpu_seconds: float = 10.0
    """Processor time of the program, which a busy machine does not use up for it."""
    wall_seconds: float = 25.0
    """For a program that waits instead of working, or gets no processor to work on."""
    memory_bytes: int = 1 << 30
    """Address space of a process: with more than one process, that of each."""
    processes: int = 1
    """Processes at a time. With 1 (and seccomp) a program cannot start another, which also bounds its memory."""
    threads: int = 64
    open_files: int = 64
    file_bytes: int = 16 << 20
    """Size of a file it writes."""
    output_bytes: int = 16 << 20
    """What it may print."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. Only `stdout` and `stderr` are the program's own words; the rest was seen from outside it."""

    exit_code: int
    """Negative: the signal that ended it."""
    stopped: Stop
    """Which limit it exceeded; `asked`: by the scorer."""
    stdout: bytes
    stderr: bytes
    """The end of it."""
    cpu_seconds: float
    wall_seconds: float
    memory_bytes: int
    """Most it had in memory, its interpreter included."""

    @property
    def killed(self) -> bool:
        """Whether it was killed, and not for a limit: by the machine that ran out of memory, or by itself."""
        return not self.stopped and self.exit_code == -_SIGKILL

    @property
    def failure(self) -> Failure:
        """What went wrong with the program, "" if nothing did. That `memory` is to blame is guessed from its last
        words.
        """
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
