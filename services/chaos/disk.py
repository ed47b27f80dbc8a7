"""A small disk of its own for a run folder, which can be full: a tmpfs, which only root may mount."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.protos.errors import EnvironmentLackError
from tandem.services.launchers.children import describe_exit

BUSY_SECONDS = 10.0
"""Killed processes have let go of the disk by then."""
_MOUNT_SECONDS = 30.0
_POLL_SECONDS = 0.1
_SMALLEST_BYTES = 1 << 20
_LEFT_BYTES = 4 << 20  # what may be written while the disk is made smaller
_BLOCK_BYTES = 4096


def check_mountable() -> None:
    """Raises EnvironmentLackError if this process may not mount a file system."""
    with TemporaryDirectory(prefix="tandem-chaos-") as folder, SmallDisk(Path(folder) / "disk", _SMALLEST_BYTES):
        pass


def check_empty(folder: Path) -> None:
    """Raises EnvironmentLackError for a folder with files, which a disk mounted there would hide."""
    if folder.is_dir() and any(folder.iterdir()):
        remedy = "empty it, choose another run.folder, or leave out disk"
        raise EnvironmentLackError(f"{folder} is not empty, so no small disk can be put there; {remedy}")


class SmallDisk(AbstractContextManager["SmallDisk"]):
    """Context manager: an empty disk of `num_bytes` at `folder`. Afterwards the folder holds, on the disk below, what
    was written there. Leaving the block raises EnvironmentLackError if processes still use the disk after
    `BUSY_SECONDS`, or if its files cannot be copied. Then it stays mounted.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder = folder
        self._num_bytes = num_bytes
        self._filler = folder / "filler"
        check_empty(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self._mount("-t", "tmpfs", "-o", f"size={num_bytes},mode=0755", "tandem-chaos")

    def __exit__(self, *_exception: object) -> None:
        self.free()
        deadline = time.monotonic() + BUSY_SECONDS
        while users_of(self._folder) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)  # a killed process may still write
        copy = self._folder.with_name(f"{self._folder.name}.copy")
        try:
            shutil.copytree(self._folder, copy, symlinks=True)
        except OSError as error:
            why = f"its files cannot be copied to {copy} ({error})"
            raise EnvironmentLackError(f"{self._folder} is still mounted: {why}; copy them, then umount it") from None
        self._unmount(copy, deadline)
        self._folder.rmdir()
        copy.rename(self._folder)

    def fill(self) -> None:
        """Leaves no room. What is written is kept."""
        for times in (1, 4, 16):  # what is written until the new size counts has to fit
            status = os.statvfs(self._folder)
            used = (status.f_blocks - status.f_bfree) * status.f_frsize
            try:  # a file that fills a large disk would take memory
                self._mount("-o", f"remount,size={used + times * _LEFT_BYTES}")
                break
            except EnvironmentLackError:
                if times == 16:
                    raise
        with open(self._filler, "wb", buffering=0) as filler, suppress(OSError):  # ENOSPC: that is the aim
            while filler.write(b"\0" * _BLOCK_BYTES):
                pass

    def free(self) -> None:
        """Has its size again."""
        self._filler.unlink(missing_ok=True)
        self._mount("-o", f"remount,size={self._num_bytes}")

    def _mount(self, *options: str) -> None:
        if said := _fault_of("mount", *options, str(self._folder)):
            raise EnvironmentLackError(f"a full disk needs a tmpfs, which cannot be mounted ({said}); leave out disk")

    def _unmount(self, copy: Path, deadline: float) -> None:
        """Waits for processes that are ending: they use the disk a little longer than they have files open."""
        while said := _fault_of("umount", str(self._folder)):
            if "busy" not in said or time.monotonic() >= deadline:
                pids = " ".join(map(str, users_of(self._folder)))
                by = f", used by the processes {pids}; end them, and then" if pids else "; later"
                then = f"umount {self._folder} && rmdir {self._folder} && mv {copy} {self._folder}"
                raise EnvironmentLackError(f"{self._folder} is still mounted ({said}){by}: {then}")
            time.sleep(_POLL_SECONDS)


def users_of(mount: Path) -> list[int]:
    """The processes with a file, a mapping or their working folder on the file system that is mounted there."""
    device = mount.stat().st_dev
    return sorted(int(process.name) for process in Path("/proc").glob("[0-9]*") if _uses(process, device))


def _uses(process: Path, device: int) -> bool:
    for link in (process / "cwd", process / "root", *process.glob("fd/*")):
        with suppress(OSError):  # closed, or the process has ended
            if link.stat().st_dev == device:
                return True
    with suppress(OSError):
        return f" {os.major(device):02x}:{os.minor(device):02x} " in (process / "maps").read_text(errors="replace")
    return False


def _fault_of(*command: str) -> str:
    """What a program says that fails, in English; "" if it succeeds."""
    if shutil.which(command[0]) is None:
        raise EnvironmentLackError(f"a full disk needs the program {command[0]}, which is not here; leave out disk")
    done = subprocess.run(
        command,
        env={**os.environ, "LC_ALL": "C"},
        capture_output=True,
        text=True,
        timeout=_MOUNT_SECONDS,
        check=False,
        start_new_session=True,  # out of reach of Ctrl-C
    )
    return " ".join(done.stderr.split()) or describe_exit(done.returncode) if done.returncode else ""
