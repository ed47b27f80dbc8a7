"""Sandboxes made by bubblewrap, which builds the root either once for a zygote or for every sandbox."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import PurePosixPath

from tandem.reward.sandbox.inside.zygote import USER, WORK_FOLDER
from tandem.reward.sandbox.launcher import (
    EXECUTABLE,
    IMPORT_BY_FOLDER,
    PYTHON,
    REWARD_FOLDER,
    IsolationName,
    ZygoteLauncher,
    inside,
    inside_sources,
    open_alone,
    open_proc,
)
from tandem.reward.sandbox.layout import Layout
from tandem.reward.sandbox.sandbox import Sandbox, SandboxError

_ENTER = f"""{IMPORT_BY_FOLDER}
from tandem.reward.sandbox.inside.zygote import enter
enter(int(sys.argv[2]), sys.argv[3:])
"""


def find_bubblewrap() -> str:
    """Finds `bwrap` on PATH, or beside the interpreter, where deploy/setup.sh puts it. Raises SandboxError."""
    beside = os.path.join(sys.prefix, "bin")
    found = shutil.which("bwrap") or shutil.which("bwrap", path=beside)
    if found is None:
        raise SandboxError(f"there is no bwrap on PATH or in {beside}")
    return found


class BubblewrapLauncher(ZygoteLauncher):
    """Runs one zygote in a root built by bubblewrap. The zygote forks every sandbox into further namespaces.

    Raises:
        SandboxError: bubblewrap is missing or does not work here, or its children may not create namespaces.
    """

    name: IsolationName = "bubblewrap"

    def __init__(self, layout: Layout, disk_bytes: int) -> None:
        self.place = find_bubblewrap()
        super().__init__(layout, disk_bytes)

    def _command(self, layout: Layout, proc: int, descriptor: int) -> list[str]:
        zygote = inside("serve", descriptor, layout.path, {"proc": proc})
        return [*_entry(proc), self.place, *bubblewrap_arguments(layout), *zygote]

    def _send_layout(self, layout: Layout) -> None:
        del layout  # bubblewrap has built it
        self._control.sendall(inside_sources())


class BubblewrapEachLauncher:
    """Starts a new Python under bubblewrap for every sandbox.

    For machines on which bubblewrap may create namespaces but its children may not.
    """

    name: IsolationName = "bubblewrap"

    def __init__(self, layout: Layout, disk_bytes: int) -> None:
        self._binary = find_bubblewrap()
        self.place = f"{self._binary}, once for every sandbox"
        self._layout = layout
        self._arguments = bubblewrap_arguments(layout, disk_bytes)

    def open(self, *, seccomp: bool) -> Sandbox:
        try:
            with open_proc() as proc:
                prefix = [*_entry(proc), self._binary, *self._arguments]
                return open_alone(prefix, self._layout.path, apart=True, seccomp=seccomp, proc=proc)
        except OSError as error:
            raise SandboxError(str(error)) from None

    def close(self) -> None:
        """Does nothing, because every sandbox has its own process."""


def bubblewrap_arguments(layout: Layout, disk_bytes: int | None = None) -> list[str]:
    """Returns bubblewrap's options for the layout. Their order matters: later mounts cover earlier ones.

    `disk_bytes`: size of the working folder; None: only the mount point is created.
    """
    # With root, processes inside would be root outside too, and exempt from process limits: see `_entry`.
    user = [] if os.geteuid() == 0 else ["--unshare-user", "--uid", str(USER), "--gid", str(USER)]
    arguments = [*user, "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]
    arguments += ["--as-pid-1"]
    for link, target in layout.links:
        arguments += ["--symlink", target, link]
    binds = (*layout.binds, *_interpreter_binds(layout))
    for folder in _folders_above([*(target for _, target in binds), *layout.devices]):
        arguments += ["--dir", folder]
    for source, target in binds:
        arguments += ["--ro-bind", source, target]
    for device in layout.devices:
        arguments += ["--dev-bind", device, device]
    for hidden in layout.hidden:
        if os.path.isdir(hidden):
            arguments += ["--tmpfs", hidden, "--remount-ro", hidden]
    if disk_bytes is None:
        arguments += ["--dir", WORK_FOLDER]
    else:
        arguments += ["--size", str(disk_bytes), "--perms", "0777", "--tmpfs", WORK_FOLDER]
    return [*arguments, "--remount-ro", "/", "--chdir", WORK_FOLDER, "--"]


def _entry(proc: int) -> list[str]:
    """For root: the command that first enters a user namespace, in which zygotes and guests can become nobody."""
    return [*PYTHON, _ENTER, REWARD_FOLDER, str(proc)] if os.geteuid() == 0 else []


def _folders_above(targets: Sequence[str]) -> list[str]:
    """Returns all parent folders, top down. Only bubblewrap's own user may enter folders that it creates implicitly."""
    above = {str(folder) for target in targets for folder in PurePosixPath(target).parents}
    return sorted(above - {"/"})


def _interpreter_binds(layout: Layout) -> list[tuple[str, str]]:
    """Returns binds for the interpreter's own files if the layout lacks them.

    A zygote that builds its own root does not need them, because it has loaded them before.
    """
    files = [EXECUTABLE]
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        files.append(os.path.join(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")))
    shown = [target for _, target in layout.binds]
    return [
        (os.path.realpath(file), file)
        for file in files
        if os.path.exists(file) and not any(file.startswith(f"{target}/") for target in shown)
    ]
