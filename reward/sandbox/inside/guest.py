"""The first process of a sandbox. It runs programs one after another, each in a new process, and reports their ends.

It trusts no program: its reports come from the kernel (exit status, times) and from its own pipes. A program cannot
signal it (it is the init of its process namespace), read its memory (it is not dumpable), or outlive its run.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tandem.reward.sandbox.inside import kernel, program, seccomp, wire

TAIL_BYTES = 4096
"""Of a program's standard error that are kept."""

_CHUNK_BYTES = 1 << 16
_STACK_BYTES = 64 << 20
_MIN_WAIT_SECONDS = 0.01
_LAST_WAIT_MILLISECONDS = 10  # for a program that ends or is killed while it is being stopped
_BEGUN = "begun"


def serve(channel: socket.socket, proc: int | None) -> NoReturn:
    """Serves the scorer until it closes the channel, then ends this process and thus the sandbox.

    `proc`: the machine's /proc, to which programs have no access; this process is the init of a process namespace.
    None: there is no isolation.
    """
    status = 1
    try:
        # Processes inside can send init only the signals that it handles, so it must not handle SIGINT.
        signal.signal(signal.SIGINT, signal.SIG_IGN if proc is None else signal.SIG_DFL)
        kernel.prctl(kernel.SET_DUMPABLE, 0)
        kernel.drop_capabilities()
        if proc is None:
            kernel.prctl(kernel.SET_CHILD_SUBREAPER, 1)
        elif os.getpid() != 1:
            raise OSError("this is not the first process of a namespace")
        wire.send(channel, {"ready": True})
        while (message := wire.receive(channel)) is not None:
            if "stop" not in message.header:  # a late stop: that run has already ended
                _serve_one(channel, message, proc)
        status = 0
    except OSError as error:
        tell(channel, error.strerror or str(error))
    finally:
        os._exit(status)


def tell(channel: socket.socket, error: str) -> None:
    """Reports why the sandbox could not start."""
    with suppress(OSError):  # the scorer has ended, which caused the error
        wire.send(channel, {"error": error})


def _serve_one(channel: socket.socket, message: wire.Message, proc: int | None) -> None:
    run = _Run(message, proc)
    try:
        run.start()
        run.watch(channel)
    finally:
        run.end()
    wire.send(channel, {**run.report, "clean": _is_empty(".")}, bytes(run.out), bytes(run.err))


@dataclass(slots=True)
class _Run:
    """One program: its process, its pipes, its outcome."""

    message: wire.Message
    proc: int | None
    stopped: str = ""
    report: dict[str, object] = field(default_factory=dict)
    out: bytearray = field(default_factory=bytearray)
    err: bytearray = field(default_factory=bytearray)
    _err_bytes: int = 0
    _process: int = 0
    _started: float = 0.0
    _descriptors: list[int] = field(default_factory=list)

    def start(self) -> None:
        limits = self.message.header["limits"]
        stdin = _sealed(self.message.parts[0])
        (out, out_end), (err, err_end), (begun, begun_end) = os.pipe(), os.pipe(), os.pipe()
        self._started = time.monotonic()
        self._process = os.fork()
        if not self._process:
            line = self.message.descriptors[0] if self.message.descriptors else os.open("/dev/null", os.O_RDONLY)
            _become_program(self.message, limits, [stdin, out_end, err_end, line, begun_end], self.proc)
        for descriptor in (stdin, out_end, err_end, begun_end, *self.message.descriptors):
            os.close(descriptor)
        self._descriptors = [out, err, begun]
        for descriptor in self._descriptors:
            os.set_blocking(descriptor, False)

    def watch(self, channel: socket.socket) -> None:
        """Waits until the program ends, exceeds a limit, or is stopped by the scorer."""
        limits = self.message.header["limits"]
        deadline = self._started + limits["wall_seconds"]
        clock = (~self._process << 3) | 2  # its processor time, see clock_getcpuclockid(3)
        ended = os.pidfd_open(self._process)
        self._descriptors.append(ended)
        poll = select.poll()
        for descriptor in (channel.fileno(), ended, self._descriptors[0], self._descriptors[1]):
            poll.register(descriptor, select.POLLIN)
        while not self.stopped:
            left = min(deadline - time.monotonic(), limits["cpu_seconds"] - time.clock_gettime(clock))
            if left <= 0:
                self.stopped = "time"
                return
            ready = {descriptor for descriptor, _ in poll.poll(max(left, _MIN_WAIT_SECONDS) * 1000)}
            if channel.fileno() in ready:
                if wire.receive(channel) is None:
                    raise ConnectionResetError("the scorer has ended")
                if not _is_readable(ended, _LAST_WAIT_MILLISECONDS):
                    self.stopped = "asked"
                return
            for descriptor in ready.intersection(self._descriptors[:2]):
                if not self._read(descriptor):
                    poll.unregister(descriptor)
            if ended in ready:
                return

    def end(self) -> None:
        """Kills the program's remaining processes and reads the rest of its pipes."""
        if not self._process:
            return
        _kill_all(self._process)
        _, status = os.waitpid(self._process, 0)
        _kill_strays()
        out, err, begun = self._descriptors[:3]
        said, fault = _read_some(begun).decode(errors="replace"), ""
        if said != _BEGUN and self.stopped in ("", "time"):  # "time": the machine was too busy to begin it
            fault = said or "it ended, or its time did, before it began"
        for descriptor in (out, err):
            while self.stopped != "output" and self._read(descriptor):
                continue
        for descriptor in self._descriptors:
            os.close(descriptor)
        self.report = {"stopped": self.stopped, "code": os.waitstatus_to_exitcode(status), "fault": fault}

    def _read(self, descriptor: int) -> bool:
        """Reads from a pipe; False at its end or if it is empty."""
        most = self.message.header["limits"]["output_bytes"]
        data = _read_some(descriptor)
        if descriptor == self._descriptors[0]:
            self.out += data
        else:
            self.err = (self.err + data)[-TAIL_BYTES:]
            self._err_bytes += len(data)
        if len(self.out) > most or self._err_bytes > most:
            self.stopped = "output"
            del self.out[most:]
        return bool(data)


def _become_program(
    message: wire.Message, limits: dict[str, Any], descriptors: list[int], proc: int | None
) -> NoReturn:
    """In the child: sets up descriptors (input, output, errors, line), then limits, then runs the program."""
    begun = program.LINE + 1
    try:
        kernel.prctl(kernel.SET_DEATH_SIGNAL, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.setsid()
        _prefer_oom_kill(proc)
        high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 64) for descriptor in descriptors]
        for number, descriptor in enumerate(high):
            os.dup2(descriptor, number)
        os.closerange(begun + 1, 1 << 20)
        if not message.descriptors:
            os.close(program.LINE)
        _limit(limits, isolated=proc is not None)
        kernel.prctl(kernel.SET_NO_NEW_PRIVILEGES, 1)
        if message.header["seccomp"]:
            seccomp.install()
        os.write(begun, _BEGUN.encode())  # any later failure is the program's own
        os.close(begun)
        program.main(message.header["kind"], [part.decode("utf-8", "replace") for part in message.parts[1:]])
    except (OSError, ValueError, MemoryError) as error:
        os.write(begun, str(error).encode() or b"no memory")
    finally:
        os._exit(1)


def _prefer_oom_kill(proc: int | None) -> None:
    """Makes the kernel kill programs before any other process when the machine runs out of memory."""
    kernel.prctl(kernel.SET_DUMPABLE, 1)  # otherwise its files in /proc belong to root
    with suppress(OSError):  # no /proc
        path = "self/oom_score_adj" if proc is not None else "/proc/self/oom_score_adj"
        adjustment = os.open(path, os.O_WRONLY, dir_fd=proc)
        os.write(adjustment, b"1000")
        os.close(adjustment)
    kernel.prctl(kernel.SET_DUMPABLE, 0)


def _limit(limits: dict[str, Any], *, isolated: bool) -> None:
    seconds = int(limits["cpu_seconds"]) + 2  # `watch` is exact; this also limits child processes
    wanted = {
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NOFILE: limits["open_files"],
        resource.RLIMIT_STACK: _STACK_BYTES,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 64,
    }
    if isolated:  # otherwise all processes of the user would count
        wanted[resource.RLIMIT_NPROC] = limits["threads"] + 3  # the program, and two that keep the sandbox
    kernel.limit(wanted)


def _sealed(data: bytes) -> int:
    descriptor = os.memfd_create("input", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor


def _read_some(descriptor: int) -> bytes:
    with suppress(BlockingIOError):
        return os.read(descriptor, _CHUNK_BYTES)
    return b""


def _is_readable(descriptor: int, milliseconds: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(milliseconds))


def _is_empty(folder: str) -> bool:
    with suppress(OSError):  # its program may have made it unreadable
        return not os.listdir(folder)
    return False


def _kill_all(process: int) -> None:
    """Kills all processes but this one; without a process namespace, only the program and its session."""
    with suppress(ProcessLookupError, PermissionError):  # nothing else was left
        os.kill(process, signal.SIGKILL)
        if os.getpid() == 1:
            os.kill(-1, signal.SIGKILL)
        else:
            os.killpg(process, signal.SIGKILL)


def _kill_strays() -> None:
    """Kills and reaps orphans that became children of this process. They may have left the program's session."""
    with suppress(ChildProcessError):
        while True:
            with suppress(FileNotFoundError), open(f"/proc/self/task/{os.getpid()}/children", "rb") as children:
                for child in children.read().split():
                    os.kill(int(child), signal.SIGKILL)
            os.waitpid(-1, 0)
