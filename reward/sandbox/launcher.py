"""Starts sandboxes: forked by a zygote process in namespaces, or one by one."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Literal, Protocol

from tandem.protos.scratch_folder import ScratchFolder
from tandem.reward.sandbox.inside import wire
from tandem.reward.sandbox.inside.zygote import WORK_FOLDER
from tandem.reward.sandbox.layout import PACKAGES_FOLDER, Layout
from tandem.reward.sandbox.sandbox import Sandbox, SandboxError
from tandem.reward.workers.child_process import ChildProcess

IsolationName = Literal["bubblewrap", "namespaces", "none"]

ZYGOTE_SECONDS = 30.0
"""Time limit for the start of a zygote, on a busy machine; on an idle one it takes a tenth of a second."""

REWARD_FOLDER = str(Path(__file__).resolve().parents[1])
# The resolved file, because a virtual environment's link is not in the sandbox.
EXECUTABLE = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
PYTHON = (EXECUTABLE, "-I", "-S", "-B", "-X", "utf8", "-c")

# Replaces the service's environment. Numerical libraries get one thread, so that a program uses one core.
_ENVIRONMENT = {"HOME": WORK_FOLDER, "TMPDIR": WORK_FOLDER, "LANG": "C.UTF-8"} | {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")
}
IMPORT_BY_FOLDER = """
import sys, types
for name, path in (("tandem", []), ("tandem.reward", [sys.argv[1]])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
"""
_START_ZYGOTE = f"""{IMPORT_BY_FOLDER}
from tandem.reward.sandbox.inside.zygote import main
main(*map(int, sys.argv[2:]))
"""
# Tandem's files are not in the sandbox, so the modules of its first process are sent over the channel.
_START_INSIDE = """
import json, socket, sys, types
entry, channel, path, settings = sys.argv[1], socket.socket(fileno=int(sys.argv[2])), *map(json.loads, sys.argv[3:])
size = int.from_bytes(channel.recv(4, socket.MSG_WAITALL))
sources = json.loads(channel.recv(size, socket.MSG_WAITALL))
for name, source in sources.items():
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(source, name, "exec"), vars(module))
    parent, _, child = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], child, module)
del sources, source
sys.path += [place for place in path if place not in sys.path]
getattr(sys.modules["tandem.reward.sandbox.inside.zygote"], entry)(channel, **settings)
"""
_INSIDE_MODULES = ("kernel", "wire", "plain", "seccomp", "calls", "program", "guest", "zygote")


class Launcher(Protocol):
    """Starts sandboxes of one kind. `open` returns at once; the sandbox starts in the background."""

    name: IsolationName
    place: str
    """The program of the machine that creates them; empty if Tandem does."""

    def open(self, *, seccomp: bool) -> Sandbox:
        """Opens a sandbox. Raises SandboxError if none can be started."""
        ...

    def close(self) -> None: ...


class ZygoteLauncher:
    """Starts sandboxes in namespaces, forked by one zygote process.

    Raises:
        SandboxError: this machine does not allow such namespaces. The message names what was refused.
    """

    name: IsolationName = "namespaces"
    place = ""

    def __init__(self, layout: Layout, disk_bytes: int) -> None:
        self._disk_bytes = disk_bytes
        try:
            with open_proc() as proc:
                self._process = start(partial(self._command, layout, proc), [proc])
        except OSError as error:
            raise SandboxError(f"the process that makes sandboxes cannot be started: {error}") from None
        self._control = self._process.connection
        self._control.settimeout(ZYGOTE_SECONDS)
        reply: wire.Message | None = None
        try:
            with suppress(ConnectionError):  # it has ended; its exit reason says why
                self._send_layout(layout)
                reply = wire.receive(self._control)
        except (OSError, ValueError) as error:
            self.close()
            raise SandboxError(f"the process that makes sandboxes did not start: {error}") from None
        if reply is None or "ready" not in reply.header:
            exit_reason = self._process.exit_reason() if reply is None else ""
            reason = reply.header["error"] if reply is not None else f"its process {exit_reason}"
            self.close()
            raise SandboxError(reason)

    def _command(self, layout: Layout, proc: int, descriptor: int) -> list[str]:
        """Returns the command that starts the zygote. `descriptor` is the zygote's end of the channel."""
        return [*PYTHON, _START_ZYGOTE, REWARD_FOLDER, str(descriptor), str(proc)]

    def _send_layout(self, layout: Layout) -> None:
        wire.send(self._control, layout.as_dict())

    def open(self, *, seccomp: bool) -> Sandbox:
        mine, theirs = socket.socketpair()
        try:
            with theirs:
                wire.send(self._control, {"disk_bytes": self._disk_bytes}, descriptors=[theirs.fileno()])
        except OSError as error:
            mine.close()
            raise SandboxError(f"the process that makes sandboxes has ended: {error}") from None
        return Sandbox(mine, None, seccomp=seccomp)

    def close(self) -> None:
        """Ends the zygote and all its sandboxes; may be called again."""
        self._process.close()


class BareLauncher:
    """Starts processes without isolation.

    Each has limits, an empty environment, its own session, and a folder that is removed afterwards.
    """

    name: IsolationName = "none"
    place = ""

    def __init__(self, layout: Layout, disk_bytes: int) -> None:
        del disk_bytes  # the size of an ordinary folder cannot be limited
        packages = [source for source, target in layout.binds if target.startswith(PACKAGES_FOLDER)]
        self._path = tuple(dict.fromkeys(os.path.dirname(source) for source in packages))

    def open(self, *, seccomp: bool) -> Sandbox:
        folder = ScratchFolder("bare")
        try:
            place = str(folder.path)
            return open_alone([], self._path, apart=False, seccomp=seccomp, folder=place, on_close=folder.close)
        except SandboxError:
            folder.close()
            raise

    def close(self) -> None:
        """Does nothing."""


def inside(entry: str, channel: int, path: Sequence[str], settings: Mapping[str, object]) -> list[str]:
    """Returns the command that runs a function of `inside.zygote` in a sandbox without Tandem's files.

    Send `inside_sources` over the channel next.
    """
    return [*PYTHON, _START_INSIDE, entry, str(channel), json.dumps(path), json.dumps(settings)]


@cache
def inside_sources() -> bytes:
    """Returns the sources of the modules of a sandbox's first process, in import order."""
    folder = Path(__file__).parent / "inside"
    sources = {"tandem": "", "tandem.reward": "", "tandem.reward.sandbox": "", "tandem.reward.sandbox.inside": ""}
    for name in _INSIDE_MODULES:
        sources[f"tandem.reward.sandbox.inside.{name}"] = (folder / f"{name}.py").read_text(encoding="utf-8")
    text = json.dumps(sources).encode()
    return len(text).to_bytes(4) + text


def open_alone(
    prefix: Sequence[str],
    path: Sequence[str],
    *,
    apart: bool,
    seccomp: bool,
    proc: int | None = None,
    folder: str = "/",
    on_close: Callable[[], None] = lambda: None,
) -> Sandbox:
    """Starts a sandbox whose first process has its own command, which begins with `prefix`.

    Raises:
        SandboxError: the sandbox cannot be started.
    """
    settings = {"proc": proc, "apart": apart}
    process: ChildProcess | None = None
    try:
        process = start(
            lambda descriptor: [*prefix, *inside("serve_alone", descriptor, path, settings)],
            [] if proc is None else [proc],
            folder=folder,
        )
        process.connection.settimeout(ZYGOTE_SECONDS)
        process.connection.sendall(inside_sources())  # does not block: it fits the socket's buffer
    except OSError as error:
        if process is not None:
            process.close()
        raise SandboxError(f"{(*prefix, *PYTHON)[0]} cannot be started: {error}") from None
    return Sandbox(process.connection, process, seccomp=seccomp, on_close=on_close)


def start(command: Callable[[int], Sequence[str]], descriptors: Sequence[int], *, folder: str = "/") -> ChildProcess:
    """Starts a command that inherits only its channel and the descriptors. Raises OSError."""
    return ChildProcess(command, descriptors=descriptors, environment=_ENVIRONMENT, folder=folder, capture="errors")


@contextmanager
def open_proc() -> Iterator[int]:
    """Opens a descriptor of /proc. Raises OSError."""
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield proc
    finally:
        os.close(proc)
