"""Makes sandboxes from namespaces: lives in their root, and forks a process into new namespaces for each.

It never runs untrusted code itself: its forks become the first processes of sandboxes (`guest`). A sandbox thus takes
two forks instead of a start of Python, and untrusted code never touches its memory.

    service ── zygote ── keeper ── first process of the sandbox ── the program, one per run
               root      new user, process, mount, network, ipc and host name namespaces; an empty working folder

Either the zygote builds the root, or bubblewrap builds it and starts the zygote in it.
"""

from __future__ import annotations

import gc
import os
import resource
import signal
import socket
import sys
from contextlib import suppress
from importlib import import_module
from typing import Any, NoReturn

from tandem.reward.sandbox.inside import guest, kernel, seccomp, wire

USER = 65534
"""User and group in the sandbox, and also outside if the service runs as root."""
WORK_FOLDER = "/tmp"
DISK_BYTES = 64 << 20
"""Size of the working folder."""

_ALL_NEW = kernel.NEW_USER | kernel.NEW_PID | kernel.NEW_MOUNTS | kernel.NEW_NET | kernel.NEW_IPC | kernel.NEW_UTS
_MOST_FILES = 4096

# Modules that contest programs import. They are loaded once here instead of in every run. Missing ones are skipped.
_WARM = """
array bisect cmath collections contextlib copy ctypes dataclasses datetime decimal enum fractions functools hashlib
heapq io itertools json math numbers operator queue random re sqlite3 ssl statistics string struct textwrap threading
time traceback types typing zlib lzma bz2
"""


def main(descriptor: str, proc: str) -> None:
    """A zygote that builds the root itself: receives the layout over the socket `descriptor`, then serves it."""
    control = socket.socket(fileno=int(descriptor))
    settings = wire.receive(control)
    if settings is not None:
        serve(control, int(proc), settings.header)


def serve(control: socket.socket, proc: int, layout: dict[str, Any] | None = None) -> None:
    """Opens a sandbox for every message until the other end closes. The message carries the sandbox's channel.

    `proc`: the machine's /proc, to which programs have no access. `layout`: the root to build; None: it is in it.
    """
    try:
        warm_up()
        if layout is not None:
            _enter_namespaces(proc)
            _build_root(layout)
        _become_nobody()
    except OSError as error:
        wire.send(control, {"error": error.strerror or str(error)})
        return
    wire.send(control, {"ready": True})
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # keepers are reaped automatically
    while (request := wire.receive(control)) is not None:
        channel = socket.socket(fileno=request.descriptors[0])
        parent = os.getpid()
        if not os.fork():
            control.close()
            _open_sandbox(channel, proc, parent)
        channel.close()


def serve_alone(channel: socket.socket, proc: int | None) -> NoReturn:
    """The first process of a sandbox that bubblewrap started, or (without `proc`) that has no isolation."""
    warm_up()
    if proc is not None:
        _become_nobody()
    guest.serve(channel, proc)


def enter(proc: str, *command: str) -> NoReturn:
    """For root: runs a command in a user namespace that maps root and nobody. Its children can become nobody, even if
    bubblewrap needs root to read the files that it mounts.
    """
    try:
        _enter_namespaces(int(proc))
        os.execv(command[0], command)
    except OSError as error:
        sys.exit(error.strerror or str(error))


def warm_up() -> None:
    """Loads the modules that programs use, and leaves the interpreter in the state of `python -I` after `site`."""
    most = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (most, most))  # the scorer's limit per item must not apply here
    for name in _WARM.split():
        with suppress(ImportError):
            import_module(name)
    site = import_module("site")
    site.setquit()
    site.setcopyright()
    site.sethelper()
    if seccomp.available():
        seccomp.assembled()
    gc.collect()
    gc.freeze()


def _enter_namespaces(proc: int) -> None:
    """Enters a user namespace that will own the root. Root maps itself and nobody; another user maps only itself."""
    owner, group = os.geteuid(), os.getegid()
    read, write = os.pipe()
    mapper = os.fork() if owner == 0 else 0
    if mapper == 0 and owner == 0:  # stays outside, where it may map two users
        os.close(write)
        os.read(read, 1)
        os._exit(0 if _map(proc, str(os.getppid()), f"0 0 1\n{USER} {USER} 1", f"0 0 1\n{USER} {USER} 1") else 1)
    kernel.unshare(kernel.NEW_USER | kernel.NEW_MOUNTS)
    os.close(write)
    mapped = mapper and os.waitstatus_to_exitcode(os.waitpid(mapper, 0)[1]) == 0
    if not mapped and not _map(proc, "self", f"0 {owner} 1", f"0 {group} 1", deny_groups=True):
        raise OSError("no user can be mapped into a new user namespace")
    os.close(read)


def _map(proc: int, process: str, users: str, groups: str, *, deny_groups: bool = False) -> bool:
    files = {**({"setgroups": "deny"} if deny_groups else {}), "gid_map": groups, "uid_map": users}
    return all(_write(proc, f"{process}/{name}", text) for name, text in files.items())


def _write(proc: int, path: str, text: str) -> bool:
    """Writes a file of the machine's /proc. Returns False on failure."""
    with suppress(OSError), open(os.open(path, os.O_WRONLY, dir_fd=proc), "wb", buffering=0) as file:
        return bool(file.write(text.encode()))
    return False


def _build_root(layout: dict[str, Any]) -> None:
    """Builds a read-only root with only what Python needs. Afterwards no other file of the machine is visible."""
    kernel.mount("none", "/", "", kernel.MS_REC | kernel.MS_PRIVATE)
    kernel.mount("stage", layout["stage"], "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755")
    os.chdir(layout["stage"])
    os.mkdir("old")
    os.mkdir("new")
    kernel.pivot_root(".", "old")
    os.chdir("/")
    kernel.mount("root", "/new", "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=755,size=1m")
    for link, target in layout["links"]:
        os.symlink(target, f"/new{link}")
    for source, target in layout["binds"]:
        _bind(f"/old{source}", f"/new{target}")
    for device in layout["devices"]:
        _bind(f"/old{device}", f"/new{device}", device=True)
    for hidden in layout["hidden"]:
        if os.path.isdir(f"/new{hidden}"):
            kernel.mount("hidden", f"/new{hidden}", "tmpfs", kernel.MS_RDONLY, "size=4k,mode=755")
    os.makedirs(f"/new{WORK_FOLDER}", exist_ok=True)
    os.chdir("/new")
    kernel.pivot_root(".", ".")
    kernel.detach(".")  # the stage, and with it the machine's root, which lay on top
    os.chdir("/")
    kernel.restrict_mount("/", devices=True)
    sys.path[:] = [entry for entry in layout["path"] if os.path.exists(entry)]


def _bind(source: str, target: str, *, device: bool = False) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o666))
    kernel.mount(source, target, "", kernel.MS_BIND | kernel.MS_REC)
    kernel.restrict_mount(target, devices=device)


def _become_nobody() -> None:
    """Becomes nobody. If only the service's user could be mapped, it stays that user, but sees none of its files."""
    try:
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
    except OSError:
        return
    kernel.prctl(kernel.SET_DUMPABLE, 1)  # otherwise root owns its forks' files in /proc, and they cannot map users


def _open_sandbox(channel: socket.socket, proc: int, parent: int) -> NoReturn:
    """In a fork: moves into new namespaces, forks the first process of the sandbox and waits for its end."""
    try:
        kernel.prctl(kernel.SET_DEATH_SIGNAL, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # the parent ended before the line above
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        user, group = os.geteuid(), os.getegid()
        kernel.prctl(kernel.SET_DUMPABLE, 1)  # otherwise its files in /proc belong to root, and it cannot map itself
        kernel.unshare(_ALL_NEW)
        if not _map(proc, "self", f"{USER} {user} 1", f"{USER} {group} 1", deny_groups=True):
            raise OSError("no user can be mapped into a nested user namespace")
        kernel.prctl(kernel.SET_DUMPABLE, 0)
        _write(proc, "sys/user/max_user_namespaces", "0")  # best effort; seccomp forbids them as well
        options = f"size={DISK_BYTES},nr_inodes={_MOST_FILES},mode=700,uid={USER},gid={USER}"
        kernel.mount("work", WORK_FOLDER, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC, options)
        os.chdir(WORK_FOLDER)
        socket.sethostname("sandbox")
        if os.fork():
            channel.close()
            os.close(proc)
            os.wait()
            os._exit(0)
        kernel.prctl(kernel.SET_DEATH_SIGNAL, signal.SIGKILL)
        guest.serve(channel, proc)
    except OSError as error:
        guest.tell(channel, error.strerror or str(error))
    finally:
        os._exit(1)
