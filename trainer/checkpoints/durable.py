"""Atomic folders: written under a temporary name, synced to disk, then renamed."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tandem.protos.errors import EnvironmentLackError

_SUFFIX = ".partial"


def partial_folder(folder: Path) -> Path:
    """The name of `folder` until it is complete, which is no version number."""
    return folder.with_name(folder.name + _SUFFIX)


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Yields an empty folder to write to. At the end it is synced to disk and renamed to `folder`, replacing an
    existing one. If the block raises, it is deleted. Raises EnvironmentLackError if the disk is full, or there is a
    file of that name.
    """
    begun = begin_folder(folder)
    try:
        with disk_full_error(folder):
            yield begun
            _finish(begun, folder)
    except BaseException:
        shutil.rmtree(begun, ignore_errors=True)
        raise


def begin_folder(folder: Path) -> Path:
    """Creates the partial folder and deletes one left by a crash. Raises EnvironmentLackError as `atomic_folder`."""
    if folder.exists() and not folder.is_dir():
        raise EnvironmentLackError(
            f"{folder}: a file stands where a folder is needed; move it away, or write elsewhere"
        )
    begun = partial_folder(folder)
    shutil.rmtree(begun, ignore_errors=True)
    with disk_full_error(folder):
        begun.mkdir(parents=True)
    return begun


def _finish(begun: Path, folder: Path) -> None:
    for root, _, names in os.walk(begun):
        for name in names:
            _fsync(Path(root, name))
        _fsync(Path(root))
    if folder.exists():  # a rename cannot replace a folder, so for a moment there is none
        retired = folder.with_name(folder.name + ".retired")
        shutil.rmtree(retired, ignore_errors=True)
        folder.rename(retired)
        begun.rename(folder)
        shutil.rmtree(retired)
    else:
        begun.rename(folder)
    _fsync(folder.parent)


@contextmanager
def disk_full_error(folder: Path) -> Iterator[None]:
    """Raises EnvironmentLackError for the errors of a full disk, also of torch's and safetensors' writers."""
    try:
        yield
    except Exception as error:
        if _is_disk_full(error, folder):
            raise EnvironmentLackError(
                f"no space left on the disk of {folder}: free some, or name another place (run.folder, sft.output)"
            ) from error
        raise


def _is_disk_full(error: Exception, folder: Path) -> bool:
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in str(error):
        return True
    # torch.save only says that its writer failed, so check the free space.
    if isinstance(error, RuntimeError) and folder.parent.exists():
        return shutil.disk_usage(folder.parent).free < 1 << 20
    return False


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
