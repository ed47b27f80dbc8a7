"""Starts sandboxes: forked by a zygote process in namespaces, one by one under bubblewrap, or without isolation. Of the
machine's files only those are visible in them that Python needs, read-only.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache, partial
from pathlib import Path, PurePosixPath
from typing import Literal

from tandem.protos.errors import ScorerError
from tandem.protos.scratch_folder import ScratchFolder
from tandem.reward.sandbox.inside import wire
from tandem.reward.sandbox.inside.zygote import DISK_BYTES, USER, WORK_FOLDER
from tandem.reward.sandbox.sandbox import Sandbox, SandboxError
from tandem.reward.workers.child_process import ChildProcess

IsolationName = Literal["bubblewrap", "namespaces", "none"]

ZYGOTE_SECONDS = 30.0
"""Time limit for the start of a zygote, on a busy machine; on an idle one it takes a tenth of a second."""

PACKAGES_FOLDER = "/packages"

_SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib64", "/lib", "/lib64")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
_DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
_REWARD_FOLDER = str(Path(__file__).resolve().parents[1])
_PROJECT = os.path.dirname(_REWARD_FOLDER)
# The resolved file, because a virtual environment's link is not in the sandbox.
_EXECUTABLE = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
_PYTHON = (_EXECUTABLE, "-I", "-S", "-B", "-X", "utf8", "-c")

# Replaces the service's environment. Numerical libraries get one thread, so that a program uses one core.
_ENVIRONMENT = {"HOME": WORK_FOLDER, "TMPDIR": WORK_FOLDER, "LANG": "C.UTF-8"} | {
    f"{library}_NUM_THREADS": "1" for library in ("OMP", "OPENBLAS", "MKL")
}
# Outside a sandbox: runs a function of `inside.zygote` with the arguments.
_RUN_OUTSIDE = """
import sys, types
for name, path in (("tandem", []), ("tandem.reward", [sys.argv[1]])):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = path
from tandem.reward.sandbox.inside import zygote
getattr(zygote, sys.argv[2])(*sys.argv[3:])
"""
# Tandem's files are not in the sandbox, so the modules of its first process are sent over the channel.
_RUN_INSIDE = """
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
_INSIDE_MODULES = ("kernel", "wire", "seccomp", "calls", "program", "guest", "zygote")


@dataclass(frozen=True, slots=True)
class Layout:
    """The root of a sandbox. All paths are absolute."""

    binds: tuple[tuple[str, str], ...]
    """(path on the machine, path in the sandbox) of files and whole folders."""
    links: tuple[tuple[str, str], ...]
    """(symbolic link, its target). Links are created first."""
    devices: tuple[str, ...]
    hidden: tuple[str, ...]
    """Folders below the binds that appear empty: installed packages and Tandem itself."""
    path: tuple[str, ...]
    """`sys.path` in the sandbox."""
    stage: str
    """A folder to mount the root on. Only the mount namespace of the builder changes."""


def layout_for(packages: Sequence[str] = ()) -> Layout:
    """Returns a root with the standard library and the given installed packages, named as in `import`. Packages that
    these import must be named as well. Raises ScorerError for one that is not installed.
    """
    links = tuple((path, os.readlink(path)) for path in _SYSTEM_LIBRARIES if os.path.islink(path))
    places = (*_SYSTEM_LIBRARIES, *_SYSTEM_FILES)
    binds = [(path, path) for path in places if os.path.exists(path) and not os.path.islink(path)]
    # Paths of Python's base installation, not of a virtual environment.
    roots = {"base": sys.base_prefix, "installed_base": sys.base_prefix}
    roots |= {"platbase": sys.base_exec_prefix, "installed_platbase": sys.base_exec_prefix}
    paths = sysconfig.get_paths(vars=roots)
    libraries = dict.fromkeys((paths["stdlib"], paths["platstdlib"], os.path.join(paths["platstdlib"], "lib-dynload")))
    for folder in libraries:
        if os.path.isdir(folder) and not _within(folder, binds):
            binds.append((os.path.realpath(folder), folder))
    for package in packages:
        binds += _package_binds(package)
    hidden = [os.path.join(folder, name) for folder in libraries for name in ("site-packages", "dist-packages")]
    hidden += ["/usr/lib/python3/dist-packages"]
    hidden += [_PROJECT] if _within(_PROJECT, binds) else []
    return Layout(
        binds=tuple(binds),
        links=links,
        devices=tuple(filter(os.path.exists, _DEVICES)),
        hidden=tuple(hidden),
        path=(*libraries, *([PACKAGES_FOLDER] if packages else [])),
        stage="/tmp" if os.path.isdir("/tmp") and not os.path.islink("/tmp") else "/dev",
    )


def _within(path: str, binds: Sequence[tuple[str, str]]) -> bool:
    return any(path == target or path.startswith(target + "/") for _, target in binds)


def _package_binds(package: str) -> list[tuple[str, str]]:
    spec = importlib.util.find_spec(package) if package.isidentifier() else None
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        raise ScorerError(f"packages: {package} is not installed where the sandbox runs")
    places = [Path(place) for place in spec.submodule_search_locations or [str(spec.origin)]]
    libraries = places[0].parent / f"{package}.libs"  # shared libraries of a wheel
    if libraries.is_dir():
        places.append(libraries)
    return [(str(place.resolve()), f"{PACKAGES_FOLDER}/{place.name}") for place in places]


class Launcher:
    """Starts sandboxes of one kind. Raises SandboxError, which names what was refused, if this machine allows none."""

    name: IsolationName
    place = ""
    """The program of the machine that creates the sandboxes; empty if Tandem does."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    def open(self, *, seccomp: bool) -> Sandbox:
        """Returns at once; the sandbox starts in the background. Raises SandboxError if none can be started."""
        raise NotImplementedError

    def close(self) -> None:
        """Ends what the sandboxes share; may be called again."""


class ZygoteLauncher(Launcher):
    """Starts sandboxes in namespaces, forked by one zygote process that builds their root."""

    name: IsolationName = "namespaces"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        try:
            with _open_proc() as proc:
                self._process = _start(partial(self._command, proc), [proc])
        except OSError as error:
            raise SandboxError(f"the process that makes sandboxes cannot be started: {error}") from None
        self._control = self._process.connection
        self._control.settimeout(ZYGOTE_SECONDS)
        reply: wire.Message | None = None
        try:
            with suppress(ConnectionError):  # it has ended; its exit reason says why
                self._send_layout()
                reply = wire.receive(self._control)
        except (OSError, ValueError) as error:
            self.close()
            raise SandboxError(f"the process that makes sandboxes did not start: {error}") from None
        if reply is None or "ready" not in reply.header:
            reason = f"its process {self._process.exit_reason()}" if reply is None else reply.header["error"]
            self.close()
            raise SandboxError(reason)

    def _command(self, proc: int, descriptor: int) -> list[str]:
        return _outside("main", descriptor, proc)

    def _send_layout(self) -> None:
        wire.send(self._control, asdict(self.layout))

    def open(self, *, seccomp: bool) -> Sandbox:
        mine, theirs = socket.socketpair()
        try:
            with theirs:
                wire.send(self._control, {}, descriptors=[theirs.fileno()])
        except OSError as error:
            mine.close()
            raise SandboxError(f"the process that makes sandboxes has ended: {error}") from None
        return Sandbox(mine, None, seccomp=seccomp)

    def close(self) -> None:
        """Ends the zygote and all its sandboxes."""
        self._process.close()


class BubblewrapLauncher(ZygoteLauncher):
    """Runs one zygote in a root built by bubblewrap. The zygote forks every sandbox into further namespaces."""

    name: IsolationName = "bubblewrap"

    def __init__(self, layout: Layout) -> None:
        self.place = find_bubblewrap()
        super().__init__(layout)

    def _command(self, proc: int, descriptor: int) -> list[str]:
        zygote = _inside("serve", descriptor, self.layout.path, proc=proc)
        return [*_entry(proc), self.place, *bubblewrap_arguments(self.layout), *zygote]

    def _send_layout(self) -> None:
        self._control.sendall(_inside_sources())  # bubblewrap has built the layout


class BubblewrapEachLauncher(Launcher):
    """Starts a new Python under bubblewrap for every sandbox, where its children may not create namespaces."""

    name: IsolationName = "bubblewrap"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout)
        self._binary = find_bubblewrap()
        self.place = f"{self._binary}, once for every sandbox"
        self._arguments = bubblewrap_arguments(layout, working_folder=True)

    def open(self, *, seccomp: bool) -> Sandbox:
        try:
            with _open_proc() as proc:
                prefix = [*_entry(proc), self._binary, *self._arguments]
                return _open_alone(prefix, self.layout.path, seccomp=seccomp, proc=proc)
        except OSError as error:
            raise SandboxError(str(error)) from None


class BareLauncher(Launcher):
    """Starts processes without isolation. Each has limits, none of the service's environment variables, its own
    session, and a folder of no fixed size that is removed afterwards.
    """

    name: IsolationName = "none"

    def open(self, *, seccomp: bool) -> Sandbox:
        packages = [source for source, target in self.layout.binds if target.startswith(PACKAGES_FOLDER)]
        path = list(dict.fromkeys(map(os.path.dirname, packages)))
        folder = ScratchFolder("bare")
        try:
            sandbox = _open_alone([], path, seccomp=seccomp, folder=str(folder.path))
        except SandboxError:
            folder.close()
            raise
        sandbox.on_close = folder.close
        return sandbox


def find_bubblewrap() -> str:
    """Finds `bwrap` on PATH, or beside the interpreter, where deploy/setup.sh puts it. Raises SandboxError."""
    beside = os.path.join(sys.prefix, "bin")
    found = shutil.which("bwrap") or shutil.which("bwrap", path=beside)
    if found is None:
        raise SandboxError(f"there is no bwrap on PATH or in {beside}")
    return found


def bubblewrap_arguments(layout: Layout, *, working_folder: bool = False) -> list[str]:
    """Returns bubblewrap's options for the layout. Their order matters: later mounts cover earlier ones. Without
    `working_folder` only its mount point is created.
    """
    # With root, processes inside would be root outside too, and exempt from process limits: see `_entry`.
    user = [] if os.geteuid() == 0 else AS_NOBODY
    mounts = bubblewrap_mounts(layout, working_folder=working_folder)
    return [*user, *NEW_NAMESPACES, "--as-pid-1", *mounts, "--chdir", WORK_FOLDER, "--"]


AS_NOBODY = ["--unshare-user", "--uid", str(USER), "--gid", str(USER)]
NEW_NAMESPACES = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--hostname", "sandbox"]


def bubblewrap_mounts(layout: Layout, *, working_folder: bool, folders: Sequence[str] = ()) -> list[str]:
    """Returns bubblewrap's options for a root with the layout and with some empty folders."""
    # First, since there may be binds below it.
    arguments = ["--size", str(DISK_BYTES), "--perms", "0777", "--tmpfs"] if working_folder else ["--dir"]
    arguments += [WORK_FOLDER]
    for link, target in layout.links:
        arguments += ["--symlink", target, link]
    binds = (*layout.binds, *_interpreter_binds(layout))
    # `folders` with a name below them, so that they are created, too.
    below = [f"{folder}/file" for folder in folders]
    for folder in _folders_above([*(target for _, target in binds), *layout.devices, *below]):
        arguments += ["--dir", folder]
    for source, target in binds:
        arguments += ["--ro-bind", source, target]
    for device in layout.devices:
        arguments += ["--dev-bind", device, device]
    for hidden in filter(os.path.isdir, layout.hidden):
        arguments += ["--tmpfs", hidden, "--remount-ro", hidden]
    return [*arguments, "--remount-ro", "/"]


def _entry(proc: int) -> list[str]:
    """For root: the command that first enters a user namespace, in which zygotes and guests can become nobody."""
    return _outside("enter", proc) if os.geteuid() == 0 else []


def _folders_above(targets: Sequence[str]) -> list[str]:
    """Returns all parent folders, top down. Only bubblewrap's own user may enter folders that it creates implicitly."""
    above = {str(folder) for target in targets for folder in PurePosixPath(target).parents}
    return sorted(above - {"/"})


def _interpreter_binds(layout: Layout) -> list[tuple[str, str]]:
    """Returns binds for the interpreter's own files if the layout lacks them. A zygote that builds its own root needs
    none, because it has loaded them before.
    """
    files = [_EXECUTABLE]
    if sysconfig.get_config_var("Py_ENABLE_SHARED"):
        files.append(os.path.join(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME")))
    shown = tuple(f"{target}/" for _, target in layout.binds)
    return [(os.path.realpath(file), file) for file in files if os.path.exists(file) and not file.startswith(shown)]


def _outside(entry: str, *arguments: int) -> list[str]:
    return [*_PYTHON, _RUN_OUTSIDE, _REWARD_FOLDER, entry, *map(str, arguments)]


def _inside(entry: str, channel: int, path: Sequence[str], **settings: object) -> list[str]:
    """The command that runs a function of `inside.zygote` in a sandbox, with the `_inside_sources` sent to it next."""
    return [*_PYTHON, _RUN_INSIDE, entry, str(channel), json.dumps(path), json.dumps(settings)]


@cache
def _inside_sources() -> bytes:
    """The sources of the modules of a sandbox's first process, in import order."""
    folder = Path(__file__).parent / "inside"
    sources = {"tandem": "", "tandem.reward": "", "tandem.reward.sandbox": "", "tandem.reward.sandbox.inside": ""}
    for name in _INSIDE_MODULES:
        sources[f"tandem.reward.sandbox.inside.{name}"] = (folder / f"{name}.py").read_text(encoding="utf-8")
    text = json.dumps(sources).encode()
    return len(text).to_bytes(4) + text


def _open_alone(
    prefix: Sequence[str], path: Sequence[str], *, seccomp: bool, proc: int | None = None, folder: str = "/"
) -> Sandbox:
    """Starts a sandbox whose first process has its own command, which begins with `prefix`. Raises SandboxError."""
    process: ChildProcess | None = None
    try:
        process = _start(
            lambda descriptor: [*prefix, *_inside("serve_alone", descriptor, path, proc=proc)],
            [] if proc is None else [proc],
            folder=folder,
        )
        process.connection.settimeout(ZYGOTE_SECONDS)
        process.connection.sendall(_inside_sources())  # does not block: it fits the socket's buffer
    except OSError as error:
        if process is not None:
            process.close()
        raise SandboxError(f"{(*prefix, *_PYTHON)[0]} cannot be started: {error}") from None
    return Sandbox(process.connection, process, seccomp=seccomp)


def _start(command: Callable[[int], Sequence[str]], descriptors: Sequence[int], *, folder: str = "/") -> ChildProcess:
    """Starts a command that inherits only its channel and the descriptors. Raises OSError."""
    return ChildProcess(command, descriptors=descriptors, environment=_ENVIRONMENT, folder=folder, capture="errors")


@contextmanager
def _open_proc() -> Iterator[int]:
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield proc
    finally:
        os.close(proc)
