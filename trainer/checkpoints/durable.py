"""Files and folders that appear whole or not at all, even if the power fails: written under a temporary name, synced to
disk, renamed, and the rename synced.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from tandem.protos.errors import EnvironmentLackError

PARTIAL = ".partial"
"""Ending of the name of a folder that is not complete."""
REMOVED = ".removed"
"""Ending of the name of a folder that is being deleted."""
_RETIRED = ".retired"
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux: fcntl.h, fs.h
_NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP)  # of file systems that cannot exchange, such as NFS


def partial_folder(folder: Path, writer: str = "") -> Path:
    """The name of `folder` until it is complete, which is no version number. Processes that may write the same folder
    at the same time have different names as `writer`.
    """
    return folder.with_name(f"{folder.name}.{writer}{PARTIAL}" if writer else folder.name + PARTIAL)


@contextmanager
def atomic_folder(
    folder: Path, *, writer: str = "", replaces: bool = True, before_rename: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """Yields an empty folder to write to. At the end it is synced to disk and renamed to `folder`; an existing one is
    replaced in one step where the file system can. If the block or `before_rename` raises, it is deleted.

    Raises EnvironmentLackError if the disk is full, or there is a file of that name, and FileExistsError if there is
    such a folder and it `replaces` none.
    """
    begun = begin_folder(folder, writer)
    try:
        with disk_full_error(folder):
            yield begun
            _sync_tree(begun)
            before_rename()
            _rename(begun, folder, replaces=replaces)
    except BaseException:
        shutil.rmtree(begun, ignore_errors=True)
        raise
    for left in folder.parent.glob(f"{folder.name}.*{PARTIAL}"):  # of writers that died, or are now refused
        shutil.rmtree(left, ignore_errors=True)


def begin_folder(folder: Path, writer: str = "") -> Path:
    """Creates the partial folder and deletes one left by a crash. Raises EnvironmentLackError as `atomic_folder`."""
    if folder.exists() and not folder.is_dir():
        raise EnvironmentLackError(
            f"{folder}: a file stands where a folder is needed; move it away, or write elsewhere"
        )
    begun = partial_folder(folder, writer)
    shutil.rmtree(begun, ignore_errors=True)
    with disk_full_error(folder):
        make_folder(folder.parent)
        begun.mkdir()
    return begun


def make_folder(folder: Path) -> None:
    """Creates a folder and the folders above it that are missing, each synced to disk. Raises OSError."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def write_file(file: Path, data: bytes, *, private: bool = False) -> None:
    """Writes a file, replacing an existing one; its folder must exist. `private`: no other user may read it. Raises
    OSError.
    """
    temporary = file.with_name(f".{file.name}.{uuid4().hex}.tmp")  # others may write the same file
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if private else 0o666)
        with open(descriptor, "wb") as written:
            written.write(data)
        move_file(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def move_file(temporary: Path, file: Path) -> None:
    """Renames a complete file, replacing an existing one, once it is on disk. Raises OSError."""
    sync(temporary)
    temporary.replace(file)
    sync(file.parent)


def remove_folder(folder: Path) -> None:
    """Deletes a folder that must not be read half deleted: it loses its name first. Raises OSError."""
    folder.rename(folder.with_name(f"{folder.name}.{uuid4().hex}{REMOVED}"))
    sync(folder.parent)
    for left in folder.parent.glob(f"*{REMOVED}"):  # and what a crash left
        shutil.rmtree(left)


def leftovers(folder: Path) -> list[Path]:
    """What writers that were killed have left in a folder: begun files and folders, and those that were being deleted.
    One whose only complete copy has a temporary name is not among them.
    """
    begun = [*folder.glob(f"*{PARTIAL}"), *folder.glob(f"*{REMOVED}"), *folder.glob(".*.tmp")]
    replaced = [one for one in folder.glob(f"*{_RETIRED}") if one.with_name(one.name.removesuffix(_RETIRED)).exists()]
    return sorted(begun + replaced)


def sync(path: Path) -> None:
    """Returns once a file's contents, or the names in a folder, are on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_tree(folder: Path) -> None:
    for root, _, names in os.walk(folder):
        for name in names:
            sync(Path(root, name))
        sync(Path(root))


def _rename(begun: Path, folder: Path, *, replaces: bool) -> None:
    retired = begun
    try:
        if not replaces or not folder.exists():
            begun.rename(folder)
        elif not _exchange(begun, folder):
            retired = folder.with_name(folder.name + _RETIRED)
            shutil.rmtree(retired, ignore_errors=True)
            folder.rename(retired)  # for a moment there is none
            begun.rename(folder)
    except OSError:
        if not replaces and folder.exists():  # a rename replaces no folder that holds something
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(folder)) from None
        raise
    sync(folder.parent)
    shutil.rmtree(retired, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchanges the names of two folders in one step. Returns False if system or file system cannot."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), str(other))


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
