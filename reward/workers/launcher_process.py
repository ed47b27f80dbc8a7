"""The processes that fork workers, as the service sees them."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tandem.protos.child_environment import child_environment
from tandem.reward.config import RewardConfig
from tandem.reward.workers.cgroup import limits_of, workers_cgroup
from tandem.reward.workers.child_process import ChildProcess, is_stopped
from tandem.reward.workers.worker_process import LAUNCH_SECONDS, WorkerProcess

# -P: the working folder stays off the path until user's code is loaded, see tandem.reward.workers.worker
_BOOTSTRAP = "import sys; from tandem.reward.workers.launcher import main; main(int(sys.argv[1]))"
_MAX_FAILURES = 2  # in a row
_END_SECONDS = 10.0


class Launchers:
    """Starts workers. One launcher per set of preloaded modules: none imports while it has workers. Thread-safe. Where
    the host allows it, all of them are in one cgroup.
    """

    def __init__(self, config: RewardConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._stack = ExitStack()
        self._cgroup = self._stack.enter_context(workers_cgroup(limits_of(config)))
        self._by_preload: dict[tuple[str, ...], _Launcher] = {}
        self._closed = False

    def spawn(self, preload: Sequence[str]) -> WorkerProcess:
        """A fresh worker that has imported the modules. Raises OSError if none can be started."""
        with self._lock:
            if self._closed:
                raise OSError("the pool is closed")
            launcher = self._by_preload.setdefault(tuple(preload), _Launcher(self._config, self._cgroup))
        return launcher.spawn(preload)

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for launcher in self._by_preload.values():
            launcher.close()
        self._stack.close()


class _Launcher:
    """A process that forks workers (`launcher.main`). It is replaced if it ended or does not answer. Thread-safe."""

    def __init__(self, config: RewardConfig, cgroup: Path | None) -> None:
        self._config = config
        self._cgroup = cgroup
        self._lock = threading.Lock()
        self._process: ChildProcess | None = None
        self._failures = 0
        self._closed = False

    def spawn(self, preload: Sequence[str]) -> WorkerProcess:
        """A fresh worker. Raises OSError if neither this launcher process nor a new one gives one."""
        replaced = False
        while True:
            connection, output, control, process = self._request(preload)
            try:
                worker = WorkerProcess(connection, output, control, process, self._config)
            except OSError:
                if replaced or not self._replace(process):
                    raise
                replaced = True
            else:
                self._failures = 0
                return worker

    def _request(self, preload: Sequence[str]) -> tuple[socket.socket, int, socket.socket, ChildProcess]:
        """Our ends of a worker's socket, output and control socket, and the process that took the request for it."""
        config = self._config
        times = {"seconds": config.timeout_seconds, "cpu_seconds": config.cpu_seconds}
        request = {"preload": list(preload), "limits": {**config.limits.model_dump(), **times}}
        connection, theirs = socket.socketpair()
        control, their_control = socket.socketpair()
        output, their_output = os.pipe()
        try:
            with theirs, their_control:
                descriptors = [theirs.fileno(), their_output, their_control.fileno()]
                process = self._ask(json.dumps(request).encode(), descriptors)
        except OSError:
            connection.close()
            control.close()
            os.close(output)
            raise
        finally:
            os.close(their_output)
        return connection, output, control, process

    def _replace(self, process: ChildProcess) -> bool:
        """Whether to ask another process, after this one gave no worker: if it has ended, is stopped, or failed the
        last time as well. (One failure may only mean slow imports.) Its other workers end with it, and their items are
        unscored (`infrastructure`).
        """
        with self._lock:
            if self._closed or process is not self._process:
                return not self._closed
            self._failures += 1
            if not process.ended and not is_stopped(process.pid) and self._failures < _MAX_FAILURES:
                return False
            self._failures = 0
            self._end()
            return True

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()

    def _ask(self, request: bytes, descriptors: list[int]) -> ChildProcess:
        with self._lock:
            if self._closed:
                raise OSError("the pool is closed")
            process = self._running()
            try:
                socket.send_fds(process.connection, [request], descriptors)
            except OSError:
                self._end()
                process = self._running()
                socket.send_fds(process.connection, [request], descriptors)
            return process

    def _running(self) -> ChildProcess:
        if self._process is not None and self._process.alive:
            return self._process
        self._end()
        self._process = ChildProcess(
            lambda descriptor: [sys.executable, "-P", "-c", _BOOTSTRAP, str(descriptor)],
            capture="nothing",
            environment=child_environment(self._config.environment),
            kind=socket.SOCK_SEQPACKET,
        )
        self._process.connection.settimeout(LAUNCH_SECONDS)
        if self._cgroup is not None:  # before the first request, so that no worker starts outside
            (self._cgroup / "cgroup.procs").write_text(str(self._process.pid))
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            self._process.close(seconds=_END_SECONDS)
            self._process = None
