"""What runs on the machines of a Ray cluster: a service as a child process of an actor, and a look around."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import ray

from tandem.protos.errors import TandemError, UserError
from tandem.services.buffer.buffer import Buffer
from tandem.services.launchers.children import ChildSpec, LocalChild

_POLL_SECONDS = 0.1
_LINES = 200
_REDIS_SECONDS = 5.0
_USER_ERROR = 2


class Ended(NamedTuple):
    """How the process ended, and the last lines of its log."""

    code: int
    lines: list[str]


class ServiceActor:
    """Runs one service as a child process. All methods run in the thread of the actor's event loop, because the process
    dies with the thread that starts it: so it dies with the actor, even if that is killed. If the cluster has other
    machines, the service listens on this one's address.
    """

    def __init__(self, spec: ChildSpec, run_token: str, folder: str, has_others: bool) -> None:
        os.chdir(folder)  # paths in recipes are relative to the folder in which `tandem run` was started
        own = frozenset(name for name in os.environ if name.startswith("RAY_"))  # the cluster's token among them
        host = [f"run.host={ray.util.get_node_ip_address()}"] if has_others else []
        command = (sys.executable, *spec.command[1:], *host)
        self._child = LocalChild(replace(spec, command=command, withheld=spec.withheld | own), run_token)
        self._refused: Ended | None = None

    async def start(self) -> int:
        """Starts the process and returns its pid; 0 if it cannot be started, and `wait` says why."""
        try:
            self._child.kill()  # what an actor that was killed has left behind here
            self._child.start()
        except UserError as error:
            self._refused = Ended(_USER_ERROR, [f"tandem: {error}"])
        return self._child.pid

    async def wait(self) -> Ended:
        """Returns when the process has ended."""
        while self._refused is None:
            code = self._child.exit_code()
            if code is not None:
                return Ended(code, self._child.last_lines(_LINES))
            await asyncio.sleep(_POLL_SECONDS)
        return self._refused

    async def terminate(self) -> None:
        self._child.terminate()

    async def kill(self) -> None:
        self._child.kill()


def look_around(folder: str, probe: str, redis_url: str) -> str:
    """What a machine lacks for services of a run: its folder with the file `probe`, its Redis. "" if nothing."""
    if not (Path(folder) / probe).is_file():
        return f"it does not see {folder}; put run.folder on a file system that all machines share, under the same path"
    try:
        with closing(Buffer(redis_url, "probe", connect_timeout_seconds=_REDIS_SECONDS)) as buffer:
            buffer.exists()
    except TandemError as error:
        return f"{error}; set run.redis_url or TANDEM_REDIS_URL to a Redis that all machines reach"
    return ""
