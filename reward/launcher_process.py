"""The launchers of worker processes as the service sees them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from reward.worker_process import LAUNCH_SECONDS, Limits, WorkerProcess

# -P: the working folder stays off the path until user's code is loaded, see reward.worker
_BOOTSTRAP = "import sys; sys.path.insert(0, sys.argv[1]); from reward.launcher import main; main(int(sys.argv[2]))"


class Launchers:
    """Start workers: one launcher for every set of modules that workers are to have, so that none imports while it has workers.

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
    """A process that forks workers (`reward.launcher`), started anew if it ended. Thread-safe."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def spawn(self, preload: Sequence[str]) -> WorkerProcess:
        """A fresh worker. Raises OSError if there is none to be had."""
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
                self._ask(json.dumps(request).encode(), [theirs.fileno(), their_output, their_line.fileno()])
        except OSError:
            for one in (channel, line):
                one.close()
            os.close(output)
            raise
        finally:
            os.close(their_output)
        return WorkerProcess(channel, line, output, self._limits)

    def close(self) -> None:
        """Kills every worker and everything they started."""
        with self._lock:
            self._closed = True
            self._end()

    def _ask(self, request: bytes, descriptors: list[int]) -> None:
        with self._lock:
            for attempt in (1, 2):
                if self._closed:
                    raise OSError("the pool is closed")
                if self._control is None or self._process is None or self._process.poll() is not None:
                    self._start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [request], descriptors)
                    return
                except OSError:
                    self._end()
                    if attempt == 2:
                        raise

    def _start(self) -> None:
        self._end()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            root = str(Path(__file__).resolve().parents[1])
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _BOOTSTRAP, root, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is the service's to handle
            )
        self._control.settimeout(LAUNCH_SECONDS)

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()  # which is what tells it
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(timeout=10.0)
            self._process = None
