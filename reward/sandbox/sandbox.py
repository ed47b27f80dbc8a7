"""One sandbox as the scorer sees it: it runs one program at a time, within limits, and reports how each ended."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Literal

from tandem.reward.sandbox.inside import wire
from tandem.reward.workers.child_process import ChildProcess, is_readable

GRACE_SECONDS = 10.0
"""Time beyond the limits of a run within which a sandbox must report the outcome."""
_HEADER_BYTES = 1 << 16
_EXIT_SECONDS = 1.0  # for a sandbox to end by itself once its channel is closed

Kind = Literal["script", "answer", "test"]
Failure = Literal["", "error", "time", "memory", "output"]


class SandboxError(Exception):
    """A sandbox did not start, refused a run, or did not report its outcome. The answer is never the cause."""


class SandboxDiedError(SandboxError):
    """A sandbox, or the program in it, was killed from outside. The run may succeed in a new sandbox."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one run."""

    cpu_seconds: float = 10.0
    """CPU time of the program, which does not depend on the load of the machine."""
    wall_seconds: float = 25.0
    """Wall-clock time, for programs that wait instead of computing."""
    memory_bytes: int = 1 << 30
    """Address space of each process. With seccomp a program cannot start another process."""
    threads: int = 64
    """Maximum number of threads; without seccomp a program can start processes in place of them."""
    open_files: int = 64
    file_bytes: int = 16 << 20
    """Size of each file that the program writes."""
    output_bytes: int = 16 << 20


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a run. Only `stdout` and `stderr` come from the program; the rest is observed from outside."""

    exit_code: int
    """If negative, the signal that ended the program."""
    stopped: Literal["", "time", "output", "asked"]
    """The limit that the program exceeded. `asked`: the scorer stopped it."""
    stdout: bytes
    stderr: bytes
    """The last bytes of standard error."""

    @property
    def killed(self) -> bool:
        """Whether the program was killed, but not for a limit: by the kernel for lack of memory, or by itself."""
        return not self.stopped and self.exit_code == -signal.SIGKILL

    @property
    def failure(self) -> Failure:
        """What went wrong; "" if nothing did. `memory` is inferred from the last line on standard error."""
        if self.stopped == "time" or self.stopped == "output":
            return self.stopped
        if self.exit_code == 0 or self.stopped == "asked":
            return ""
        if self.exit_code == -signal.SIGXCPU:
            return "time"
        last_line = self.stderr.strip().rpartition(b"\n")[2]
        return "memory" if self.killed or b"MemoryError" in last_line.partition(b":")[0] else "error"


class Sandbox:
    """A channel to the first process of a sandbox. Used by one thread; closing it ends everything inside.

    `process`: was started for this sandbox; None if a zygote forked it. `seccomp`: whether system calls are filtered.
    """

    def __init__(self, channel: socket.socket, process: ChildProcess | None, *, seccomp: bool) -> None:
        self._channel = channel
        self._process = process
        self._seccomp = seccomp
        self.on_close: Callable[[], None] = lambda: None
        """Called after the sandbox has ended, once per `close`."""
        self._deadline = 0.0
        self._most_bytes = 0
        self.clean = True
        """Whether the working folder is empty, so that a further run of the same answer may follow."""

    def await_ready(self, seconds: float) -> None:
        """Waits until the sandbox has started. Raises SandboxError if it did not start, or has ended since."""
        self._channel.settimeout(seconds)
        try:
            message = wire.receive(self._channel, _HEADER_BYTES)
        except TimeoutError:
            raise SandboxError(f"a sandbox did not start within {seconds:g} s") from None
        except (OSError, ValueError):
            message = None
        if message is None:
            end = self._process.exit_reason(seconds=_EXIT_SECONDS) if self._process else "ended without a message"
            raise SandboxError(f"a sandbox did not start: its process {end}")
        if "ready" not in message.header:
            raise SandboxError(f"a sandbox did not start: {message.header.get('error')}")
        if is_readable(self._channel.fileno()):
            raise SandboxError("a sandbox ended while it waited for a program")

    def start(
        self, kind: Kind, texts: Sequence[str], limits: Limits, stdin: bytes = b"", line: socket.socket | None = None
    ) -> None:
        """Starts a run. `outcome` waits for its end.

        Args:
            kind: `script`: (prelude, code) with `stdin`; `answer`: (prelude, code), called over `line`; `test`:
                (prelude, test, entry point), which calls an answer over `line`.
            line: one end of a socket pair between an answer and its caller.

        Raises SandboxDiedError if the sandbox has ended.
        """
        self._deadline = time.monotonic() + limits.wall_seconds + GRACE_SECONDS
        self._most_bytes = 2 * limits.output_bytes + _HEADER_BYTES
        self._channel.settimeout(limits.wall_seconds + GRACE_SECONDS)
        header = {"kind": kind, "limits": asdict(limits), "seccomp": self._seccomp}
        parts = [text.encode("utf-8", "replace") for text in texts]
        try:
            wire.send(self._channel, header, stdin, *parts, descriptors=[line.fileno()] if line is not None else [])
        except OSError as error:
            self.clean = False
            raise SandboxDiedError(f"a sandbox took no program: {error}") from None

    def stop(self) -> None:
        """Stops the run. Its outcome still has to be read; if the sandbox has ended, that reports it."""
        with suppress(OSError):
            wire.send(self._channel, {"stop": True})

    def outcome(self) -> Outcome:
        """Waits until the sandbox's first process reports the end of the run. Raises SandboxDiedError if that process
        ended without a report; SandboxError if the program did not begin, or there was no report in time.
        """
        self._channel.settimeout(max(0.1, self._deadline - time.monotonic()))
        try:
            message = wire.receive(self._channel, self._most_bytes)
        except (OSError, ValueError):
            message = None
        if message is None:
            self.clean = False
            if time.monotonic() >= self._deadline:
                raise SandboxError(f"a sandbox did not report the end of its program within {GRACE_SECONDS:g} s")
            raise SandboxDiedError("a sandbox ended in the middle of a run")
        header = message.header
        if fault := header.get("error") or header["fault"]:
            self.clean = False
            raise SandboxError(f"a program did not begin: {fault}")
        self.clean = header["clean"]
        return Outcome(header["code"], header["stopped"], *message.parts)

    def run(self, kind: Kind, texts: Sequence[str], limits: Limits, stdin: bytes = b"") -> Outcome:
        self.start(kind, texts, limits, stdin)
        return self.outcome()

    def close(self) -> None:
        """Ends the sandbox and everything in it; may be called again."""
        self._channel.close()
        if self._process is not None:
            self._process.close(seconds=_EXIT_SECONDS)
        self.on_close()
