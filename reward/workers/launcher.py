"""The main loop of the launcher: the process that workers are forked from, and that kills what they leave behind.

It has one thread and never runs user's code, so forking it is safe. It has imported what judges need, so a worker is
ready within milliseconds. A process that outlives its worker becomes the launcher's child and is killed. When the
service ends in any way, the control socket closes, and everything is killed.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NoReturn

from tandem.reward.registry import SCORERS, preload
from tandem.reward.sandbox.inside import kernel
from tandem.reward.workers.child_process import children_of
from tandem.reward.workers.worker import serve

_SWEEP_MILLISECONDS = 250  # how long an orphan may live
_END_SECONDS = 5.0
_MAX_REQUEST_BYTES = 1 << 16
_CHANNEL = 3  # the worker's descriptor of its socket


class Launcher:
    """Forks on request. A request brings descriptors: the worker's socket, its output, and the control socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._controls: dict[int, int] = {}
        """By worker, the descriptor that reports its exit status to the pool, and receives the request to kill."""
        self._pids: dict[int, int] = {}
        """By descriptor, the worker, until it is asked to be killed."""
        self._poll = select.poll()
        self._poll.register(control, select.POLLIN)
        self._wake, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._poll.register(self._wake, select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)

    def run(self) -> None:
        while True:
            for descriptor, _ in self._poll.poll(_SWEEP_MILLISECONDS if self._controls else None):
                if descriptor == self._wake:
                    with suppress(BlockingIOError):
                        os.read(self._wake, 4096)
                elif descriptor == self._control.fileno():
                    if not self._answer():
                        self._end_everything()
                        return
                elif descriptor in self._pids:
                    _kill_group(self._pids.pop(descriptor))  # its exit is reported when it is reaped
                    self._poll.unregister(descriptor)
            self._reap()
            self._end_orphans()

    def _answer(self) -> bool:
        """Forks the requested worker; False if the control socket was closed."""
        message, descriptors, _, _ = socket.recv_fds(self._control, _MAX_REQUEST_BYTES, 3)
        if not message:
            return False
        request = json.loads(message)
        channel, output, control = descriptors
        if request["preload"]:
            preload(request["preload"])
            gc.freeze()  # keeps the garbage collector from writing to, and so copying, shared pages
        sys.stdout.flush()
        sys.stderr.flush()
        launcher = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become_worker(launcher, channel, output, request["limits"])
        with suppress(OSError):
            os.setpgid(pid, pid)  # both processes do this, to avoid a race
        os.close(channel)
        os.close(output)
        os.set_blocking(control, False)
        self._controls[pid], self._pids[control] = control, pid
        _tell(control, {"pid": pid})
        self._poll.register(control, select.POLLIN)
        return True

    def _reap(self) -> None:
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            control = self._controls.pop(ended.si_pid, None)
            if control is not None:
                _kill_group(ended.si_pid)  # before its pid can be reused
            _, status = os.waitpid(ended.si_pid, 0)
            if control is not None:
                self._end_orphans()
                _tell(control, {"status": os.waitstatus_to_exitcode(status)})
                if self._pids.pop(control, None) is not None:
                    self._poll.unregister(control)
                os.close(control)

    def _end_orphans(self) -> None:
        """Kills processes whose parents ended; then their children, which become ours, until none is left."""
        deadline = time.monotonic() + 0.2  # then the next sweep goes on
        while orphans := [pid for pid in children_of(os.getpid()) if pid not in self._controls]:
            ended = False
            for pid in orphans:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                with suppress(ChildProcessError):
                    ended |= os.waitpid(pid, os.WNOHANG)[0] == pid
            if time.monotonic() > deadline:
                return
            if not ended:
                time.sleep(0.001)

    def _end_everything(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        while children_of(os.getpid()) and time.monotonic() < deadline:
            for pid in self._controls:
                _kill_group(pid)
            self._reap()
            self._end_orphans()
            time.sleep(0.002)


def _tell(control: int, message: Mapping[str, object]) -> None:
    with suppress(OSError):  # the pool has closed it
        os.write(control, json.dumps(message).encode() + b"\n")


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _become_worker(launcher: int, channel: int, output: int, limits: Mapping[str, Any]) -> NoReturn:
    code = 1
    try:
        kernel.prctl(kernel.SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)  # it ended before the line above
        with suppress(OSError):
            os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(channel, _CHANNEL, inheritable=False)
        for name in os.listdir("/proc/self/fd"):
            if int(name) > _CHANNEL:
                with suppress(OSError):
                    os.close(int(name))
        wanted = {resource.RLIMIT_DATA: limits["memory_bytes"], resource.RLIMIT_NOFILE: limits["open_files"]}
        kernel.limit({**wanted, resource.RLIMIT_CORE: 0})
        serve(_CHANNEL, limits)
        code = 0
    except BaseException:  # this process must never return into the launcher's code
        traceback.print_exc()
    finally:
        with suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main(descriptor: int) -> None:
    kernel.prctl(kernel.SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends with the service
    os.set_inheritable(descriptor, False)
    list(SCORERS.values())  # imported here: once a user's folder is on a worker's path, its files could replace ours
    gc.freeze()
    with socket.socket(fileno=descriptor) as control:
        Launcher(control).run()
