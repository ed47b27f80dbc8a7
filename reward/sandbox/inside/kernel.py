"""System calls for sandboxes, by ctypes, because Python 3.11 lacks them.

The modules of this folder run in the sandbox or create it. They import only the standard library and each other. Only
`wire` is used on both sides.
"""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Mapping

NEW_MOUNTS = 0x00020000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_USER = 0x10000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000

MS_RDONLY = 0x1
MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x40000

SET_DEATH_SIGNAL = 1
SET_DUMPABLE = 4
SET_SECCOMP = 22
SET_CHILD_SUBREAPER = 36
SET_NO_NEW_PRIVILEGES = 38

_MNT_DETACH = 2
_MOUNT_SETATTR = 442  # the same number on every architecture
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_CAPABILITY_VERSION_3 = 0x20080522

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("set", "clear", "propagation", "user_namespace"))


def unshare(flags: int) -> None:
    """Moves the caller into new namespaces. Only its children enter a new process namespace."""
    _check(_libc.unshare(ctypes.c_int(flags)), "unshare")


def mount(source: str, target: str, kind: str, flags: int, options: str = "") -> None:
    arguments = (os.fsencode(source), os.fsencode(target), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _check(_libc.mount(*arguments), f"mount {target}")


def restrict_mount(path: str, *, devices: bool) -> None:
    """Forbids writing, set-user-id and, unless `devices`, device files on a mount tree. Needs Linux 5.12."""
    wanted = MS_RDONLY | MS_NOSUID | (0 if devices else MS_NODEV)
    attributes = _MountAttributes(set=wanted)  # the first bits of mount_setattr(2) are those of mount(2)
    arguments = (ctypes.c_int(_AT_FDCWD), os.fsencode(path), ctypes.c_uint(_AT_RECURSIVE), ctypes.byref(attributes))
    _check(_libc.syscall(ctypes.c_long(_MOUNT_SETATTR), *arguments, ctypes.c_size_t(32)), f"mount_setattr {path}")


def pivot_root(new_root: str, old_root: str) -> None:
    _check(_libc.pivot_root(os.fsencode(new_root), os.fsencode(old_root)), "pivot_root")


def detach(path: str) -> None:
    """Unmounts a tree at once, even if it is in use."""
    _check(_libc.umount2(os.fsencode(path), ctypes.c_int(_MNT_DETACH)), f"umount {path}")


def prctl(option: int, *values: int) -> None:
    filled = [ctypes.c_ulong(value) for value in (*values, 0, 0, 0, 0)][:4]
    _check(_libc.prctl(ctypes.c_int(option), *filled), f"prctl {option}")


def limit(wanted: Mapping[int, int]) -> None:
    """Sets resource limits of this process, which it cannot raise again."""
    for kind, most in wanted.items():
        hard = resource.getrlimit(kind)[1]
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(kind, (least, least))


def drop_capabilities() -> None:
    """Drops all capabilities. With no_new_privs this cannot be undone."""
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    none = (ctypes.c_uint32 * 6)()
    _check(_libc.capset(ctypes.byref(header), ctypes.byref(none)), "capset")


def _check(result: int, what: str) -> None:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
