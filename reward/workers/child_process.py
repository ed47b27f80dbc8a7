"""Child processes of the reward service: start, lines under a deadline, end and its reason; what /proc says of them."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from tandem.protos.child_environment import child_environment

_OUTPUT_TAIL_BYTES = 2000
_EXIT_SECONDS = 5.0  # from the end of its channel to the end of the process
_KILL_SECONDS = 10.0
_CHECK_SECONDS = 0.1


class HungError(Exception):
    """No line came in time. The process still exists."""


class DiedError(Exception):
    """The process closed its end of the channel."""


class LineChannel:
    """Exchanges lines with a process over a socket and forwards what it prints to stderr. Used by one thread."""

    def __init__(self, connection: socket.socket, output: int) -> None:
        self.connection = connection
        self.printed_bytes = 0
        """Since it was last set to 0."""
        self._output = output
        self._output_open = True
        self._output_tail = b""
        self._received = b""
        self._unsent = memoryview(b"")
        self._poll = select.poll()
        for descriptor in (connection.fileno(), output):
            os.set_blocking(descriptor, False)
            self._poll.register(descriptor, select.POLLIN)

    @property
    def quiet(self) -> bool:
        return not self._received and not is_readable(self.connection.fileno())

    @property
    def partial_bytes(self) -> int:
        """Received bytes of a line that has no end yet."""
        return 0 if b"\n" in self._received else len(self._received)

    def send(self, data: bytes) -> None:
        """Queues data; `receive` sends it while it waits."""
        self._unsent = memoryview(bytes(self._unsent) + data)

    def receive(self, seconds: float, check: Callable[[bool], None] = lambda idle: None) -> list[bytes]:
        """Waits for lines and returns those that arrived, at least one. Raises HungError, DiedError.

        `check`: called at least every 0.1 s, with whether nothing happened meanwhile; ends the wait by raising.
        """
        deadline = time.monotonic() + seconds
        while b"\n" not in self._received:
            left = deadline - time.monotonic()
            if left <= 0:
                raise HungError
            self._poll.modify(self.connection, select.POLLIN | (select.POLLOUT if self._unsent else 0))
            ready = self._poll.poll(1000.0 * min(left, _CHECK_SECONDS))
            for descriptor, event in ready:
                if descriptor == self._output:
                    self._forward_output()
                elif event & (select.POLLIN | select.POLLHUP | select.POLLERR):
                    self._read()
                else:
                    self._write()
            check(not ready)
        *complete, self._received = self._received.split(b"\n")
        return complete

    def last_output(self) -> str:
        while self._output_open and is_readable(self._output):
            self._forward_output()
        return _last_line(self._output_tail)

    def _read(self) -> None:
        try:
            data = self.connection.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            raise DiedError
        self._received = self._received + data if self._received else data

    def _write(self) -> None:
        try:
            self._unsent = self._unsent[self.connection.send(self._unsent) :]
        except BlockingIOError:
            return
        except OSError:
            self._unsent = memoryview(b"")  # the next read finds out

    def _forward_output(self) -> None:
        try:
            data = os.read(self._output, 1 << 16)
        except BlockingIOError:
            return
        if not data:
            self._poll.unregister(self._output)
            self._output_open = False
            return
        self._output_tail = (self._output_tail + data)[-_OUTPUT_TAIL_BYTES:]
        self.printed_bytes += len(data)
        sys.stderr.write(data.decode(errors="replace"))


class ChildProcess:
    """A process in a session of its own with one end of a socket. Closing the socket tells it to end.

    `kill` may be called from any thread, everything else from one.

    Args:
        command: gets the descriptor of the child's end of the socket.
        environment: all its variables.
        capture: what of its output `output` reads: `all`, only `errors` (the rest is dropped), or `nothing` (it goes
            where this process's output goes).

    Raises OSError if it cannot be started.
    """

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        environment: Mapping[str, str],
        capture: Literal["all", "errors", "nothing"],
        descriptors: Sequence[int] = (),
        folder: str | None = None,
        kind: int = socket.SOCK_STREAM,
    ) -> None:
        self.ended = False
        """Whether it was ended from here, or found to have ended."""
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, kind)
        output = {"all": subprocess.PIPE, "errors": subprocess.DEVNULL, "nothing": None}[capture]
        errors = {"all": subprocess.STDOUT, "errors": subprocess.PIPE, "nothing": None}[capture]
        try:
            with theirs:
                self._process = subprocess.Popen(
                    command(theirs.fileno()),
                    pass_fds=[theirs.fileno(), *descriptors],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=errors,
                    bufsize=0,
                    env=environment,
                    cwd=folder,
                    start_new_session=True,  # it is killed with all it started; Ctrl-C is the service's to handle
                )
        except OSError:
            self.connection.close()
            raise
        self.pid = self._process.pid
        self._captured = self._process.stdout or self._process.stderr

    @property
    def output(self) -> int:
        """Descriptor of its captured output."""
        assert self._captured is not None, "nothing is captured"
        return self._captured.fileno()

    @property
    def alive(self) -> bool:
        return self._exit_status() is None

    def exit_reason(self, *, seconds: float = _EXIT_SECONDS) -> str:
        """Ends the process after giving it `seconds` to exit, and says how it ended and what it wrote last."""
        status = self._await_exit(seconds)
        self.kill()
        return describe_exit(status, self.last_output())

    def last_output(self) -> str:
        os.set_blocking(self.output, False)  # something that it started may hold the other end
        with suppress(BlockingIOError):
            return _last_line(os.read(self.output, 4096))
        return ""

    def kill(self) -> None:
        """Kills the process and its process group. May be called again."""
        self.ended = True
        if self._process.returncode is None:  # until it is waited for, its number cannot be another group's
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(timeout=_KILL_SECONDS)

    def close(self, *, seconds: float = 0.0) -> None:
        """Closes the channel, gives the process `seconds` to exit, kills it and frees its output. May be called again.
        A stopped process is continued, so that it can end what it started.
        """
        self.ended = True
        self.connection.close()
        if seconds:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)
            self._await_exit(seconds)
        self.kill()
        if self._captured is not None:
            self._captured.close()

    def _await_exit(self, seconds: float) -> int | None:
        deadline = time.monotonic() + seconds
        while (status := self._exit_status()) is None and time.monotonic() < deadline:
            time.sleep(0.002)
        return status

    def _exit_status(self) -> int | None:
        """Exit code, or the negative signal that killed it; None while it runs. Does not reap it: see `kill`."""
        if self._process.returncode is not None:
            return self._process.returncode
        try:
            found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # another thread has just reaped it
            return self._process.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class LineProcess(ChildProcess):
    """Runs `main(descriptor, parent_pid)` of a module of ours in a new interpreter and exchanges lines of JSON with it.
    If `main` asks for it, the kernel ends the process with the thread that started it.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        # -P: a file in the working folder named like a module of ours must not replace it
        code = f"import sys; from {module} import main; main(*map(int, sys.argv[1:]))"
        super().__init__(
            lambda descriptor: [sys.executable, "-P", "-c", code, str(descriptor), str(os.getpid())],
            capture="all",
            environment={**child_environment(), **environment},
        )
        self._channel = LineChannel(self.connection, self.output)

    def send(self, message: Mapping[str, object]) -> None:
        self._channel.send(json.dumps(message).encode() + b"\n")

    def receive(self, seconds: float) -> Iterator[dict[str, Any]]:
        """The messages that arrive first, at least one. Raises HungError, DiedError."""
        return map(json.loads, self._channel.receive(seconds))

    def last_output(self) -> str:
        return self._channel.last_output()


def describe_exit(status: int | None, last_output: str = "") -> str:
    """How a process ended, as the end of a sentence. `status`: None if it had closed its channel and was alive."""
    if status is None:
        how = "closed its channel"
    elif status < 0:
        how = f"was killed by {signal.Signals(-status).name}"
    else:
        how = f"exited with code {status}"
    return how + (f"; it last wrote: {last_output[:200]}" if last_output else "")


def _last_line(text: bytes) -> str:
    return text.decode(errors="replace").strip().rpartition("\n")[2]


def is_readable(descriptor: int) -> bool:
    """Whether it can be read at once: data, or the end."""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def children_of(pid: int) -> list[int]:
    """The living processes that `pid` started or inherited; none if it has ended."""
    found: list[int] = []
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        for thread in threads:
            with suppress(ProcessLookupError):
                found += map(int, (thread / "children").read_text().split())
    except (FileNotFoundError, ProcessLookupError):
        import psutil  # looks at every process: only for kernels without lists of children

        with suppress(psutil.NoSuchProcess):
            return [child.pid for child in psutil.Process(pid).children()]
    return found


def stat_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name: state, parent, … Raises OSError if the process has gone."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        return stat_fields(pid)[0] in "tT"
    except OSError:
        return False


def memory_kills() -> int | None:
    """How many processes the kernel has killed for lack of memory (of the whole machine or a cgroup) since it started;
    None if it does not say.
    """
    with suppress(OSError), open("/proc/vmstat", "rb") as figures:
        for line in figures:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return None


def count_descendants(pid: int, enough: int) -> int:
    """Number of descendants of `pid`; counting stops above `enough`."""
    pending, number = [pid], 0
    while pending and number <= enough:
        children = children_of(pending.pop())
        number += len(children)
        pending += children
    return number
