"""The launchers of worker processes as the service sees them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

from tandem.reward.workers.processes import is_stopped
from tandem.reward.workers.worker_process import LAUNCH_SECONDS, Limits, Parent, WorkerProcess

# -P: the working folder stays off the path until user's code is loaded, see tandem.reward.workers.worker
_BOOTSTRAP = "import sys; from tandem.reward.workers.launcher import main; main(int(sys.argv[1]))"
_MOST_SILENCES = 2  # in a row
_END_SECONDS = 10.0


class Launchers:
    """Start workers: one launcher for every set of modules that workers are to have, so that none imports while it has
    workers.

    Thread-safe.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._by_preload: dict[tuple[str, ...], _Launcher] = {}
        self._closed = False

    def spawn(self, preload: Sequence[str]) -> WorkerProcess:
        """A fresh worker that has the modules. Raises OSError if there is none to be had."""
        with self._lock:
            if self._closed:
                raise OSError("the pool is closed")
            launcher = self._by_preload.setdefault(tuple(preload), _Launcher(self._limits))
        return launcher.spawn(preload)

    def close(self) -> None:
        """Kills every worker and everything they started."""
        with self._lock:
            self._closed = True
        for launcher in self._by_preload.values():
            launcher.close()


class _Launcher:
    """A process that forks workers (`tandem.reward.workers.launcher`), started anew if it ended or gives none in its
    time. Thread-safe.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._parent = Parent(0, ended=True)
        self._silences = 0
        self._closed = False

    def spawn(self, preload: Sequence[str]) -> WorkerProcess:
        """A fresh worker. Raises OSError if there is none to be had, of a new launcher neither."""
        asked: list[Parent] = []
        try:
            return self._spawn(preload, asked)
        except OSError:
            if not asked or not self._replaced(asked[0]):
                raise
            return self._spawn(preload, asked)

    def _spawn(self, preload: Sequence[str], asked: list[Parent]) -> WorkerProcess:
        """`asked`: gets the launcher that took the request."""
        request = {
            "preload": list(preload),
            "limits": {
                "memory_bytes": self._limits.memory_bytes,
                "open_files": self._limits.open_files,
                "cpu_seconds": self._limits.cpu_seconds,
                "seconds": self._limits.seconds,
            },
        }
        channel, theirs = socket.socketpair()
        line, their_line = socket.socketpair()
        output, their_output = os.pipe()
        try:
            with theirs, their_line:
                parent = self._ask(json.dumps(request).encode(), [theirs.fileno(), their_output, their_line.fileno()])
        except OSError:
            for one in (channel, line):
                one.close()
            os.close(output)
            raise
        finally:
            os.close(their_output)
        asked.append(parent)
        worker = WorkerProcess(channel, line, output, self._limits, parent)
        self._silences = 0
        return worker

    def _replaced(self, parent: Parent) -> bool:
        """Whether another launcher is to be asked, after one that gave no worker: if that has gone, is stopped, or gave
        none the last time either (once, it may only be slow to import). Its other workers end with it, and their items
        are unscored (`infrastructure`).
        """
        with self._lock:
            if self._closed or parent is not self._parent:
                return not self._closed
            self._silences += 1
            if not parent.ended and not is_stopped(parent.pid) and self._silences < _MOST_SILENCES:
                return False
            self._silences = 0
            self._end()
            return True

    def close(self) -> None:
        """Kills every worker and everything they started."""
        with self._lock:
            self._closed = True
            self._end()

    def _ask(self, request: bytes, descriptors: list[int]) -> Parent:
        with self._lock:
            for attempt in (1, 2):
                if self._closed:
                    raise OSError("the pool is closed")
                if self._control is None or self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [request], descriptors)
                    return self._parent
                except OSError:
                    self._end()
                    if attempt == 2:
                        raise
        raise AssertionError("the second attempt returns or raises")

    def _start(self) -> None:
        self._end()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the service's to handle
            )
        self._control.settimeout(LAUNCH_SECONDS)
        self._parent = Parent(self._process.pid)

    def _end(self) -> None:
        self._parent.ended = True
        if self._control is not None:
            self._control.close()  # which is what tells it
            self._control = None
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGCONT)  # if it is stopped: it has what its workers left to end
            try:
                self._process.wait(timeout=_END_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=_END_SECONDS)
            self._process = None
