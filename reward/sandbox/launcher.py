"""How sandboxes come into being: forked by a zygote inside namespaces, or started one by one with bubblewrap or with nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, Protocol

from reward.sandbox.inside import wire
from reward.sandbox.inside.zygote import USER, WORK_FOLDER
from reward.sandbox.layout import PACKAGES_FOLDER, Layout
from reward.sandbox.sandbox import Sandbox, SandboxError

IsolationName = Literal["bubblewrap", "namespaces", "none"]

ZYGOTE_SECONDS = 30.0
"""To start, on a busy machine; it takes a tenth of a second on an idle one."""

# Nothing of the service's environment. One thread for numerical libraries: a program has its share of the machine, and no more.
_ENVIRONMENT = {"HOME": WORK_FOLDER, "TMPDIR": WORK_FOLDER, "LANG": "C.UTF-8"} | {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")
}
# Not the link in a virtual environment, which is not in the sandbox.
_EXECUTABLE = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
_PYTHON = (_EXECUTABLE, "-I", "-S", "-B", "-X", "utf8", "-c")
_START_ZYGOTE = (
    "import sys; sys.path.insert(0, sys.argv[1]); from reward.sandbox.inside.zygote import main; main(int(sys.argv[2]))"
)
# Tandem's files are not in the sandbox: the modules of its first process come over the channel.
_START_GUEST = """
import json, socket, sys, types
channel = socket.socket(fileno=int(sys.argv[1]))
size = int.from_bytes(channel.recv(4, socket.MSG_WAITALL))
sources = json.loads(channel.recv(size, socket.MSG_WAITALL))
for name, source in sources.items():
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(source, name, "exec"), vars(module))
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
del sources
sys.modules["reward.sandbox.inside.zygote"].warm_up()
sys.path.extend(json.loads(sys.argv[2]))
sys.modules["reward.sandbox.inside.guest"].serve(channel, apart=json.loads(sys.argv[3]))
"""
_GUEST_MODULES = ("kernel", "wire", "plain", "seccomp", "calls", "program", "guest", "zygote")


class Launcher(Protocol):
    """Makes sandboxes of one kind. `open` returns at once: the sandbox starts in the background."""

    name: IsolationName

    def open(self, *, seccomp: bool) -> Sandbox:
        """Raises SandboxError if none can be started."""
        ...

    def close(self) -> None: ...


class ZygoteLauncher:
    """Sandboxes from namespaces, forked by one zygote process.

    Raises:
        SandboxError: this machine gives no such namespaces; the message says what was refused.
    """

    name: IsolationName = "namespaces"

    def __init__(self, layout: Layout, disk_bytes: int) -> None:
        self._disk_bytes = disk_bytes
        self._control, theirs = socket.socketpair()
        with theirs:
            command = [*_PYTHON, _START_ZYGOTE, str(Path(__file__).resolve().parents[2]), str(theirs.fileno())]
            self._process = _start(command, theirs)
        self._control.settimeout(ZYGOTE_SECONDS)
        try:
            wire.send(self._control, layout.as_dict())
            reply = wire.receive(self._control)
        except (OSError, ValueError) as error:
            self.close()
            raise SandboxError(f"the process that makes sandboxes did not start: {error}") from None
        if reply is None or "ready" not in reply.header:
            reason = reply.header["error"] if reply is not None else "the process that makes sandboxes has ended"
            self.close()
            raise SandboxError(reason)

    def open(self, *, seccomp: bool) -> Sandbox:
        mine, theirs = socket.socketpair()
        try:
            with theirs:
                wire.send(self._control, {"disk_bytes": self._disk_bytes}, descriptors=[theirs.fileno()])
        except OSError as error:
            mine.close()
            raise SandboxError(f"the process that makes sandboxes has gone: {error}") from None
        return Sandbox(mine, None, seccomp=seccomp)

    def close(self) -> None:
        """Ends the zygote and all its sandboxes; may be called again."""
        self._control.close()
        self._process.kill()
        self._process.wait(timeout=ZYGOTE_SECONDS)
        if self._process.stderr is not None:
            self._process.stderr.close()


class BubblewrapLauncher:
    """Each sandbox a new Python under bubblewrap."""

    name: IsolationName = "bubblewrap"

    def __init__(self, layout: Layout, disk_bytes: int) -> None:
        binary = shutil.which("bwrap")
        if binary is None:
            raise SandboxError("there is no bwrap on PATH")
        self._layout = layout
        self._prefix = [binary, *bubblewrap_arguments(layout, disk_bytes)]

    def open(self, *, seccomp: bool) -> Sandbox:
        # Of root, bubblewrap would make a process that is root outside: no limit on processes would hold for it.
        nobody = USER if os.geteuid() == 0 else None
        return _spawn_guest(self._prefix, self._layout.path, apart=True, seccomp=seccomp, user=nobody)

    def close(self) -> None:
        """Holds nothing: every sandbox has its own process."""


class BareLauncher:
    """No isolation at all: a process with limits, no environment and a session of its own, in a folder that is removed afterwards."""

    name: IsolationName = "none"

    def __init__(self, layout: Layout, disk_bytes: int) -> None:
        del disk_bytes  # of an ordinary folder nothing limits the size
        packages = [source for source, target in layout.binds if target.startswith(PACKAGES_FOLDER)]
        self._path = tuple(dict.fromkeys(os.path.dirname(source) for source in packages))

    def open(self, *, seccomp: bool) -> Sandbox:
        folder = tempfile.mkdtemp(prefix="tandem-")

        def leave() -> None:
            shutil.rmtree(folder, ignore_errors=True)

        try:
            return _spawn_guest([], self._path, apart=False, seccomp=seccomp, folder=folder, leave=leave)
        except SandboxError:
            leave()
            raise

    def close(self) -> None:
        """Holds nothing."""


def bubblewrap_arguments(layout: Layout, disk_bytes: int) -> list[str]:
    """The options that make bubblewrap build the layout around a Python. The order counts: later ones cover earlier ones."""
    arguments = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--uid", str(USER), "--gid", str(USER), "--hostname", "sandbox", "--as-pid-1", "--new-session"]
    for link, target in layout.links:
        arguments += ["--symlink", target, link]
    for source, target in (*layout.binds, *_interpreter_binds(layout)):
        arguments += ["--ro-bind", source, target]
    for device in layout.devices:
        arguments += ["--dev-bind", device, device]
    for hidden in layout.hidden:
        if os.path.isdir(hidden):
            arguments += ["--tmpfs", hidden, "--remount-ro", hidden]
    return [
        *arguments,
        "--size",
        str(disk_bytes),
        "--tmpfs",
        WORK_FOLDER,
        "--remount-ro",
        "/",
        "--chdir",
        WORK_FOLDER,
        "--",
    ]


def _interpreter_binds(layout: Layout) -> list[tuple[str, str]]:
    """The interpreter's own files, where the layout has them not: a zygote has loaded them before it builds its root."""
    files = [_EXECUTABLE]
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        files.append(os.path.join(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")))
    shown = [target for _, target in layout.binds]
    return [
        (os.path.realpath(file), file)
        for file in files
        if os.path.exists(file) and not any(file.startswith(f"{target}/") for target in shown)
    ]


@cache
def _guest_sources() -> bytes:
    """The modules of a sandbox's first process, in an order in which each finds those it imports."""
    folder = Path(__file__).parent / "inside"
    sources = {"reward": "", "reward.sandbox": "", "reward.sandbox.inside": ""}
    for name in _GUEST_MODULES:
        sources[f"reward.sandbox.inside.{name}"] = (folder / f"{name}.py").read_text(encoding="utf-8")
    text = json.dumps(sources).encode()
    return len(text).to_bytes(4, "big") + text


def _spawn_guest(
    prefix: Sequence[str],
    path: Sequence[str],
    *,
    apart: bool,
    seccomp: bool,
    user: int | None = None,
    folder: str = "/",
    leave: Callable[[], None] = lambda: None,
) -> Sandbox:
    mine, theirs = socket.socketpair()
    with theirs:
        command = [*prefix, *_PYTHON, _START_GUEST, str(theirs.fileno()), json.dumps(path), json.dumps(apart)]
        try:
            process = _start(command, theirs, user=user, folder=folder)
            mine.settimeout(ZYGOTE_SECONDS)
            mine.sendall(_guest_sources())  # fits into the socket's buffer: nothing waits for the process
        except OSError as error:
            mine.close()
            raise SandboxError(f"{command[0]} cannot be started: {error}") from None
    return Sandbox(mine, process, seccomp=seccomp, leave=leave)


def _start(
    command: Sequence[str], channel: socket.socket, *, user: int | None = None, folder: str = "/"
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        pass_fds=[channel.fileno()],
        env=_ENVIRONMENT,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
        user=user,
        group=user,
        extra_groups=None if user is None else [],
    )
