"""The scorer's side of one sandbox, which runs one program at a time and reports how each ended."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Sequence
from typing import Literal

from tandem.reward.sandbox.inside import wire
from tandem.reward.sandbox.limits import Limits, Outcome
from tandem.reward.workers.child_process import ChildProcess

GRACE_SECONDS = 10.0
"""Time beyond the limits of a run within which a sandbox must report the outcome."""
_HEADER_BYTES = 1 << 16
_EXIT_SECONDS = 1.0  # for a sandbox to end by itself once its channel is closed

Kind = Literal["script", "answer", "test"]


class SandboxError(Exception):
    """A sandbox did not start, refused a run, or did not report its outcome. The answer is never the cause."""


class SandboxDiedError(SandboxError):
    """A sandbox, or the program in it, was killed from outside. The run may succeed in a new sandbox."""


class Sandbox:
    """A channel to the first process of a sandbox. Used by one thread; closing it ends everything inside.

    Args:
        channel: from a launcher.
        process: the process that was started for this sandbox; None if a zygote forked it.
        seccomp: whether programs run behind the filter of system calls.
        on_close: called once, after the sandbox has ended.
    """

    def __init__(
        self,
        channel: socket.socket,
        process: ChildProcess | None,
        *,
        seccomp: bool,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self._channel = channel
        self._process = process
        self._seccomp = seccomp
        self._on_close = on_close
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
        if message is None or "ready" not in message.header:
            raise SandboxError(f"a sandbox did not start: {message.header.get('error') if message else self._ending()}")
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        if poll.poll(0):
            raise SandboxError("a sandbox ended while it waited for a program")

    def start(
        self, kind: Kind, texts: Sequence[str], limits: Limits, stdin: bytes = b"", line: socket.socket | None = None
    ) -> None:
        """Starts a run. `outcome` waits for its end.

        Args:
            kind: `script`: (prelude, code) with `stdin`; `answer`: (prelude, code), called over `line`; `test`:
                (prelude, test, entry point), which calls an answer over `line`.
            line: one end of a socket pair between an answer and its caller.

        Raises:
            SandboxError: the sandbox has ended.
        """
        self._deadline = time.monotonic() + limits.wall_seconds + GRACE_SECONDS
        self._most_bytes = 2 * limits.output_bytes + _HEADER_BYTES
        self._channel.settimeout(limits.wall_seconds + GRACE_SECONDS)
        header = {"kind": kind, "limits": limits.as_dict(), "seccomp": self._seccomp}
        parts = [text.encode("utf-8", "replace") for text in texts]
        try:
            descriptors = [line.fileno()] if line is not None else []
            wire.send(self._channel, header, stdin, *parts, descriptors=descriptors)
        except OSError as error:
            self.clean = False
            raise SandboxDiedError(f"a sandbox took no program: {error}") from None

    def fileno(self) -> int:
        """Returns a descriptor that becomes readable when a run has ended."""
        return self._channel.fileno()

    def stop(self) -> None:
        """Stops the run. Its outcome still has to be read."""
        try:
            wire.send(self._channel, {"stop": True})
        except OSError:
            return  # it has ended; `outcome` reports that

    def outcome(self) -> Outcome:
        """Waits until the sandbox's first process reports the end of the run.

        Raises:
            SandboxDiedError: that process ended without a report.
            SandboxError: the program did not begin, or there was no report in time.
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
        if "error" in header or header["fault"]:
            self.clean = False
            raise SandboxError(f"a program did not begin: {header.get('error') or header['fault']}")
        self.clean = header["clean"]
        out, err = message.parts
        return Outcome(header["code"], header["stopped"], out, err, header["cpu"], header["wall"], header["memory"])

    def run(self, kind: Kind, texts: Sequence[str], limits: Limits, stdin: bytes = b"") -> Outcome:
        """Starts a run and waits for its outcome. Raises the errors of `start` and `outcome`."""
        self.start(kind, texts, limits, stdin)
        return self.outcome()

    def close(self) -> None:
        """Ends the sandbox and everything in it; may be called again."""
        self._channel.close()
        if self._process is not None:
            self._process.close(seconds=_EXIT_SECONDS)
            self._process = None
        on_close, self._on_close = self._on_close, lambda: None
        on_close()

    def _ending(self) -> str:
        if self._process is None:
            return "its process ended without a message"
        return f"its process {self._process.exit_reason(seconds=_EXIT_SECONDS)}"
