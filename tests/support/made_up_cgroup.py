"""Files that look like the cgroup of a container that was given one of its own."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class MadeUpCgroup(NamedTuple):
    """The cgroup, and what stands in place of /proc/self of a process in it."""

    folder: Path
    proc: Path


def made_up_cgroup(place: Path, controllers: str) -> MadeUpCgroup:
    made = MadeUpCgroup(place / "cgroup2", place / "proc")
    for folder in made:
        folder.mkdir()
    (made.proc / "mounts").write_text(f"proc /proc proc rw 0 0\ncgroup2 {made.folder} cgroup2 rw,nsdelegate 0 0\n")
    (made.proc / "cgroup").write_text("0::/\n")
    (made.folder / "cgroup.controllers").write_text(f"{controllers}\n")
    (made.folder / "cgroup.events").write_text("populated 1\n")
    (made.folder / "cgroup.procs").write_text("")
    return made
