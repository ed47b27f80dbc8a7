"""Temporary folders that are removed even if their owner is killed.

The process that creates a folder locks it, and its forked children share the lock. A folder without a lock has no
owner; `sweep`, or the creation of the next folder of the same kind, removes it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tandem.protos.errors import EnvironmentLackError

_RANDOM_CHARACTERS = 8  # as many as `tempfile.mkdtemp` appends
_TRIES = 10  # a concurrent sweep may remove a new folder before it is locked


def remove(folder: Path) -> None:
    """Removes a folder and its contents, as far as permissions allow."""
    shutil.rmtree(folder, ignore_errors=True)


class ScratchFolder:
    """A private folder `tandem-<kind>-…` in the temporary folder, or in /tmp if that path is longer than `longest_path`
    bytes. `clear` removes a folder of this kind with the files elsewhere that are named after it. Raises
    EnvironmentLackError if no writable temporary folder has a short enough path.
    """

    def __init__(self, kind: str, *, longest_path: int = 4096, clear: Callable[[Path], None] = remove) -> None:
        self._clear = clear
        sweep(kind, clear=clear)
        self.path, self._lock = _make(f"tandem-{kind}-", longest_path)

    def close(self) -> None:
        """Removes the folder. May be called twice."""
        if self._lock >= 0:
            self._clear(self.path)
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> Path:
        return self.path

    def __exit__(self, *_exception: object) -> None:
        self.close()


def sweep(kind: str, *, clear: Callable[[Path], None] = remove) -> None:
    """Removes this user's folders of that kind whose owners have ended. Folders of live processes stay, in any run."""
    for place in _places():
        for folder in sorted(place.glob(f"tandem-{kind}-*")):
            lock = _locked(folder)
            if lock is not None:
                try:
                    clear(folder)
                finally:
                    os.close(lock)


def _places() -> Iterator[Path]:
    try:
        usual = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise EnvironmentLackError(f"no temporary folder can be made: {error.strerror}") from None
    yield from dict.fromkeys((Path(usual), Path("/tmp")))


def _make(prefix: str, longest_path: int) -> tuple[Path, int]:
    """A new folder, and a descriptor that holds its lock."""
    reasons = []
    for place in _places():
        if len(os.fsencode(place / prefix)) + _RANDOM_CHARACTERS > longest_path:
            reasons.append(f"{place} is a path too long for what goes into it")
            continue
        try:
            for _ in range(_TRIES):
                folder = Path(tempfile.mkdtemp(prefix=prefix, dir=place))
                lock = _locked(folder)
                if lock is not None:
                    return folder, lock
            reasons.append(f"{place}: others remove every folder made there")
        except OSError as error:
            reasons.append(f"{place}: {error.strerror}")
    raise EnvironmentLackError(f"no temporary folder can be made: {'; '.join(reasons)}; set TMPDIR to a short path")


def _locked(folder: Path) -> int | None:
    """A descriptor that locks the folder; None if it is locked, another user's, or gone."""
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # gone, a link, or another user's
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        status = os.fstat(lock)
        if status.st_uid == os.geteuid() and os.path.samestat(folder.lstat(), status):
            return lock
    except OSError:  # locked, or its path means another folder by now
        pass
    os.close(lock)
    return None
