"""What each kind of fault does: `begin`, and `end` once its time is over."""

from __future__ import annotations

import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psutil

from tandem.services.chaos.disk import SmallDisk
from tandem.services.chaos.processes import Supervisor, is_alive
from tandem.services.chaos.proxy import RedisProxy
from tandem.services.chaos.redis import OwnRedis
from tandem.services.chaos.schedule import REDIS, SUPERVISOR, Fault, Kind
from tandem.services.launchers.process_group import USER_ERROR

SLOW_SECONDS = 0.2
"""Delay of each message, in each direction."""
_END_SECONDS = 10.0  # until what is killed has ended
_NO_SPACE = re.compile(r"disk( of .+)? is full|no space left", re.IGNORECASE)
"""How `tandem run` and its services name a full disk."""


@dataclass(frozen=True, slots=True)
class Run:
    """What faults can reach of a run. `redis` is None for an external one, `disk` without that kind of fault."""

    supervisor: Supervisor
    proxy: RedisProxy | None
    redis: OwnRedis | None
    disk: SmallDisk | None


class Effect(ABC):
    """One fault that happens."""

    def __init__(self, fault: Fault, run: Run) -> None:
        self.fault = fault
        self.run = run
        self.note = ""
        """What the fault has met, for the reader of its line."""

    @abstractmethod
    def begin(self) -> None: ...

    def end(self) -> None:
        """Called once, `fault.seconds` later."""
        return

    def left_behind(self) -> list[psutil.Process]:
        """What lives of the processes that had to end because of it, once what it hit works again."""
        return []

    def may_end_run(self, code: int, said: Sequence[str]) -> bool:
        """Whether it can be why the run has ended with this exit code and these last lines. Then the run is resumed."""
        return False


class Kill(Effect):
    """kill -9 of a service, of a process below it, of Redis, or of the supervisor."""

    def __init__(self, fault: Fault, run: Run) -> None:
        super().__init__(fault, run)
        self._below: list[psutil.Process] = []
        """Those that the killed service had started, such as its environments', or all services of the supervisor."""

    def begin(self) -> None:
        if self.fault.target == REDIS:
            _own_redis(self.run).kill()
        elif self.fault.target == SUPERVISOR:
            self._below = self.run.supervisor.processes()
            self.run.supervisor.send(signal.SIGKILL)
        else:
            self._kill_service()

    def left_behind(self) -> list[psutil.Process]:
        _, left = psutil.wait_procs([process for process in self._below if is_alive(process)], _END_SECONDS)
        return [process for process in left if is_alive(process)]

    def may_end_run(self, code: int, said: Sequence[str]) -> bool:
        return self.fault.target == SUPERVISOR and code == -signal.SIGKILL

    def _kill_service(self) -> None:
        chosen = self.run.supervisor.processes_of(self.fault.target)
        if self.fault.below and len(chosen) > 1:
            chosen = [max(chosen[1:], key=_memory)]  # vLLM's engine, or a rank of the trainer
            self.note = " (a process below it)"
        else:
            self._below = chosen[1:]
        for process in chosen[:1]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


class Stop(Effect):
    """SIGSTOP of a service with all its processes, or of Redis; SIGCONT at the end."""

    def __init__(self, fault: Fault, run: Run) -> None:
        super().__init__(fault, run)
        self._stopped: list[psutil.Process] = []

    def begin(self) -> None:
        if self.fault.target == REDIS:
            self._stopped = [psutil.Process(_own_redis(self.run).pid)]
        else:
            self._stopped = self.run.supervisor.processes_of(self.fault.target)
        for process in self._stopped:
            with suppress(psutil.NoSuchProcess):
                process.suspend()

    def end(self) -> None:
        for process in self._stopped:
            with suppress(psutil.NoSuchProcess):  # its supervisor has killed it
                process.resume()


class Cut(Effect):
    """The service's connections to Redis break, and new ones are refused."""

    def begin(self) -> None:
        assert self.run.proxy is not None
        self.run.proxy.cut(self.fault.target)

    def end(self) -> None:
        assert self.run.proxy is not None
        self.run.proxy.restore(self.fault.target)


class Slow(Cut):
    """The service's connections to Redis are slow."""

    def begin(self) -> None:
        assert self.run.proxy is not None
        self.run.proxy.slow(self.fault.target, SLOW_SECONDS)


class FullDisk(Effect):
    """The disk of the run folder is full, with Redis' files on it. Redis and the run may end of that."""

    def begin(self) -> None:
        assert self.run.disk is not None
        self.run.disk.fill()

    def end(self) -> None:
        assert self.run.disk is not None
        self.run.disk.free()

    def may_end_run(self, code: int, said: Sequence[str]) -> bool:
        return code == USER_ERROR and any(map(_NO_SPACE.search, said))


class RedisLoss(Effect):
    """Redis is killed and starts again without what it acknowledged in its last second."""

    def begin(self) -> None:
        lost = _own_redis(self.run).restart_without_last_second()
        self.note = f" ({lost} bytes of its log)"


EFFECTS: Mapping[Kind, type[Effect]] = {
    "kill": Kill,
    "stop": Stop,
    "cut": Cut,
    "slow": Slow,
    "disk": FullDisk,
    "redis-loss": RedisLoss,
}


def _own_redis(run: Run) -> OwnRedis:
    assert run.redis is not None, "no fault of an external Redis is scheduled"
    return run.redis


def _memory(process: psutil.Process) -> int:
    with suppress(psutil.NoSuchProcess):
        return int(process.memory_info().rss)
    return 0
