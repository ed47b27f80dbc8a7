"""A service of a run in an actor of a Ray cluster. The process group restarts it like a process; Ray does not."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import ray
from ray import ObjectRef
from ray.actor import ActorHandle
from ray.exceptions import RayError, RayTaskError

from tandem.services.launchers.children import Child, ChildSpec
from tandem.services.launchers.ray_actor import Ended

START_SECONDS = 240.0
"""How long a service waits for a place in the cluster and for Ray to start a process there. The process alone takes a
minute where other work keeps all cores busy.
"""
_USER_ERROR = 2


class RayChild(Child):
    """A service in an actor. A new actor is made at each start. One that dies counts as a process killed by SIGKILL.

    `make_actor` makes the actor; `lack` says what it waits for if it has no place.
    """

    def __init__(self, spec: ChildSpec, make_actor: Callable[[], ActorHandle], lack: Callable[[], str]) -> None:
        super().__init__(spec)
        self._make_actor = make_actor
        self._lack = lack
        self._actor: ActorHandle | None = None
        self._begun: ObjectRef
        self._ended: ObjectRef
        self._pid = 0
        self._lines: list[str] = []

    @property
    def pid(self) -> int:
        return self._pid

    def start(self) -> None:
        assert self._actor is None, f"{self.name} is already running"
        self._lines = []
        self._actor = self._make_actor()
        self._begun, self._ended = self._actor.start.remote(), self._actor.wait.remote()
        self.started_at = time.monotonic()
        self.state = "starting"

    def exit_code(self) -> int | None:
        if self._actor is None:
            return None
        if _is_ready(self._ended):
            return self._leave(_result(self._ended))
        if not self._has_place():
            if time.monotonic() < self.started_at + START_SECONDS:
                return None
            lack = self._lack() or "the cluster has room for it; Ray's logs may say why"
            return self._leave(Ended(_USER_ERROR, [f"tandem: its actor did not start in {START_SECONDS:g} s: {lack}"]))
        return None

    @property
    def alive(self) -> bool:
        return self._actor is not None and not _is_ready(self._ended)

    def terminate(self) -> None:
        if self._actor is None or not self.alive:
            return
        if self._has_place():
            self._actor.terminate.remote()
        else:  # it has no process yet
            ray.kill(self._actor)

    def kill(self) -> None:
        if self._actor is not None and self.alive:
            self._actor.kill.remote()

    def reap(self) -> None:
        super().reap()
        if self._actor is not None:  # one that does not answer
            self._leave(Ended(-signal.SIGKILL, []))

    def last_lines(self, count: int) -> list[str]:
        return self._lines[-count:]

    def _has_place(self) -> bool:
        """Whether the actor has started the process, or failed to."""
        if not self._pid and _is_ready(self._begun):
            try:
                self._pid = ray.get(self._begun)
            except RayError:
                return True  # `_ended` says why
        return _is_ready(self._begun)

    def _leave(self, ended: Ended) -> int:
        """Gives up the actor, and with it its place."""
        ray.kill(self._actor)
        self._actor, self._pid, self._lines = None, 0, ended.lines
        return ended.code


def _is_ready(result: ObjectRef) -> bool:
    ready, _ = ray.wait([result], timeout=0)
    return bool(ready)


def _result(ended: ObjectRef) -> Ended:
    try:
        return Ended(*ray.get(ended))
    except RayTaskError as error:
        return Ended(1, str(error).splitlines())
    except RayError as error:  # the actor has died, or its machine
        return Ended(-signal.SIGKILL, [f"its Ray actor died: {' '.join(str(error).split())}"])
