"""What /proc says of processes: children, stopped ones, and those killed for lack of memory."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """The living processes that `pid` started or inherited; none if it has ended."""
    found: list[int] = []
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        for thread in threads:
            with suppress(ProcessLookupError):
                found += map(int, (thread / "children").read_text().split())
    except FileNotFoundError:
        return found if Path(f"/proc/{pid}").exists() is False else _children_by_parent(pid)
    except ProcessLookupError:
        return found
    return found


def _children_by_parent(pid: int) -> list[int]:
    """The same on kernels without lists of children."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == pid:
                    found.append(int(entry.name))
    return found


def is_stopped(pid: int) -> bool:
    """Whether a process is stopped by a signal or a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except OSError:  # it has gone
        return False


def memory_kills() -> int | None:
    """How many processes the kernel has killed for lack of memory (of the machine or of a cgroup) since it started;
    None if it does not say. In a container, too, it counts those of the whole machine.
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
