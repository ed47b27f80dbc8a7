"""A cgroup (version 2) for the processes that run others' code. It bounds them in total, and ends them in one step.

Only a cgroup that was delegated to this process is changed: systemd marks it (`Delegate=yes`), and a container may have
one of its own. The kernel gives limits only to cgroups beside which no process is left in their parent, so the
processes of the delegated cgroup move into a leaf of it first.
https://systemd.io/CGROUP_DELEGATION
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from tandem.reward.config import RewardConfig

SERVICES = "tandem-services"
"""The leaf that the processes of the delegated cgroup move into."""
_WORKERS = "tandem-workers-"  # and the service's pid
_PROC = Path("/proc/self")
_MOST_PASSES = 100  # a process may start another one while it moves
_THREADS_PER_PROCESS = 64
_LAUNCHER_BYTES = 1 << 30
_KILL_SECONDS = 5.0


def limits_of(config: RewardConfig) -> dict[str, int]:
    """The limits for all workers of a service and everything they start, by file of the cgroup."""
    limits = config.limits
    return {
        "memory.max": config.num_workers * limits.memory_bytes + _LAUNCHER_BYTES,
        "pids.max": config.num_workers * (limits.processes + 1) * _THREADS_PER_PROCESS,
    }


def delegated(controllers: frozenset[str], proc: Path = _PROC) -> Path | None:
    """The folder of the cgroup that this process may divide, None if it has none with these controllers."""
    with suppress(OSError, StopIteration):
        mount = next(line.split()[1] for line in _lines(proc / "mounts") if line.split()[2] == "cgroup2")
        path = next(line.removeprefix("0::/") for line in _lines(proc / "cgroup") if line.startswith("0::/"))
        own = Path(mount, path)
        folder = own.parent if own.name == SERVICES else own
        available = set((folder / "cgroup.controllers").read_text().split())
        if controllers <= available and _is_delegated(folder, Path(mount)):
            return folder
    return None


@contextmanager
def workers_cgroup(limits: Mapping[str, int], proc: Path = _PROC) -> Iterator[Path | None]:
    """Makes a cgroup with these limits and yields its folder, None where the host does not allow it. Kills what is left
    in it at the end. Write a pid to `cgroup.procs` in it to bound that process and all that it starts.
    """
    folder = delegated(controllers_of(limits), proc)
    made = None
    if folder is not None:
        with suppress(OSError):  # e.g. a file system that is mounted read-only
            made = _make(folder, limits)
    try:
        yield made
    finally:
        if made is not None:
            _end(made)


def controllers_of(limits: Mapping[str, int]) -> frozenset[str]:
    """`memory` for `memory.max`, and so on."""
    return frozenset(file.partition(".")[0] for file in limits)


def _make(folder: Path, limits: Mapping[str, int]) -> Path:
    services = folder / SERVICES
    services.mkdir(exist_ok=True)
    for _ in range(_MOST_PASSES):
        pids = (folder / "cgroup.procs").read_text().split()
        if not pids:
            break
        for pid in pids:
            with suppress(ProcessLookupError):  # it has ended
                (services / "cgroup.procs").write_text(pid)
    (folder / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in controllers_of(limits)))
    for left in folder.glob(f"{_WORKERS}*"):  # by services that were killed
        _remove(left)
    made = folder / f"{_WORKERS}{os.getpid()}"
    made.mkdir()
    for file, value in limits.items():
        (made / file).write_text(str(value))
    return made


def _end(cgroup: Path) -> None:
    """Kills what is in the cgroup and removes it. What cannot be killed in time stays, and so does the cgroup."""
    deadline = time.monotonic() + _KILL_SECONDS
    with suppress(OSError):  # before Linux 5.14
        (cgroup / "cgroup.kill").write_text("1")
    with suppress(OSError):
        while "populated 1" in (cgroup / "cgroup.events").read_text() and time.monotonic() < deadline:
            time.sleep(0.005)
    _remove(cgroup)


def _remove(cgroup: Path) -> None:
    with suppress(OSError):  # it holds processes
        cgroup.rmdir()


def _is_delegated(folder: Path, mount: Path) -> bool:
    with suppress(OSError):
        if os.getxattr(folder, "user.delegate") == b"1":
            return True
    own_container = folder == mount and (folder / "cgroup.events").exists()  # the host's root has no such file
    return own_container and os.access(folder / "cgroup.procs", os.W_OK)


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines()
