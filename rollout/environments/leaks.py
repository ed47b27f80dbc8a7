"""What this process holds that an environment should give back: threads, open files, processes, temporary files."""

from __future__ import annotations

import asyncio
import gc
import os
import tempfile
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

Held = Mapping[str, Mapping[str, str]]
"""Kind → id → name."""


def held() -> Held:
    """What is held now. Call it in the event loop, in a process that leads its session."""
    gc.collect()
    running = asyncio.current_task()
    return {
        "threads": dict(_threads()),
        "open files": dict(_open_files()),
        "child processes": dict(_child_processes()),
        "temporary files": {str(path): path.name for path in Path(tempfile.gettempdir()).rglob("*")},
        "asyncio tasks": {str(id(task)): task.get_name() for task in asyncio.all_tasks() if task is not running},
    }


def growth(before: Held, after: Held, least: int) -> str:
    """What there is `least` more of, with up to three names; empty if there is none."""
    found = []
    for kind, ones in after.items():
        if (more := len(ones) - len(before[kind])) >= least:
            names = [ones[one] for one in ones if one not in before[kind]]
            found.append(f"{more} more {kind} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})")
    return " and ".join(found)


def _threads() -> Iterator[tuple[str, str]]:
    """Also those that native code has started."""
    names = {str(thread.native_id): thread.name for thread in threading.enumerate()}
    for one in os.listdir("/proc/self/task"):
        yield one, names.get(one, "native thread")


def _open_files() -> Iterator[tuple[str, str]]:
    for one in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of this listing
            yield one, os.readlink(f"/proc/self/fd/{one}")


def _child_processes() -> Iterator[tuple[str, str]]:
    """Children of this process, also those that have ended and nobody has waited for, and all others of its session."""
    own = os.getpid()
    for one in os.listdir("/proc"):
        if not one.isdecimal() or int(one) == own:
            continue
        with suppress(OSError):  # it has ended
            name, _, rest = Path(f"/proc/{one}/stat").read_text().partition("(")[2].rpartition(")")
            _state, parent, _group, session = rest.split()[:4]
            if own in (int(parent), int(session)):
                yield one, name
