"""A small disk of its own for a run folder, which can be full: a tmpfs, which only root may mount."""

from __future__ import annotations

import os
import shutil
import subprocess
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from tandem.protos.errors import EnvironmentLackError

_MOUNT_SECONDS = 30.0
_SMALLEST_BYTES = 1 << 20
_LEFT_BYTES = 4 << 20  # what may be written while the disk is made smaller
_BLOCK_BYTES = 4096


def check_mountable() -> None:
    """Raises EnvironmentLackError if this process may not mount a file system."""
    with TemporaryDirectory(prefix="tandem-chaos-") as folder, SmallDisk(Path(folder) / "disk", _SMALLEST_BYTES):
        pass


class SmallDisk(AbstractContextManager["SmallDisk"]):
    """Context manager: an empty disk of `num_bytes` at `folder`. Afterwards the folder holds, on the disk below, what
    was written there.
    """

    def __init__(self, folder: Path, num_bytes: int) -> None:
        self._folder = folder
        self._num_bytes = num_bytes
        self._filler = folder / "filler"
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise EnvironmentLackError(f"{folder} is not empty, so no small disk can be put there; leave out disk")
        self._mount("-t", "tmpfs", "-o", f"size={num_bytes},mode=0755", "tandem-chaos")

    def __exit__(self, *_exception: object) -> None:
        self.free()
        copy = self._folder.with_name(f"{self._folder.name}.copy")
        shutil.copytree(self._folder, copy, symlinks=True)
        _run("umount", str(self._folder))
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
        _run("mount", *options, str(self._folder))


def _run(*command: str) -> None:
    if shutil.which(command[0]) is None:
        raise EnvironmentLackError(f"a full disk needs the program {command[0]}, which is not here; leave out disk")
    done = subprocess.run(command, capture_output=True, text=True, timeout=_MOUNT_SECONDS, check=False)
    if done.returncode:
        said = " ".join(done.stderr.split())
        raise EnvironmentLackError(f"a full disk needs the right to {command[0]} ({said}); leave out disk")
