"""Who is whose child, who is stopped, and who fell to the end of memory, from /proc."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def children_of(pid: int) -> list[int]:
    """The processes that `pid` started or inherited and that still exist; none if it is gone."""
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
    """Whether a process does nothing until a signal or a debugger lets it go on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "tT"
    except OSError:  # it has gone
        return False


def memory_kills() -> int | None:
    """How many processes the kernel has killed for want of memory, the machine's or that of a group, since it started;
    None if it does not say. In a container: on the whole machine.
    """
    with suppress(OSError), open("/proc/vmstat", "rb") as figures:
        for line in figures:
            if line.startswith(b"oom_kill "):
                return int(line.split()[1])
    return None


def count_descendants(pid: int, enough: int) -> int:
    """How many processes stem from `pid`; counting stops above `enough`."""
    open_ones, number = [pid], 0
    while open_ones and number <= enough:
        children = children_of(open_ones.pop())
        number += len(children)
        open_ones += children
    return number
