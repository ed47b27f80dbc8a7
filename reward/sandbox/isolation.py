"""Finds the isolation that works on this machine, by trying to break out of it, and opens pools of sandboxes."""

from __future__ import annotations

import json
import socket
import tempfile
import threading
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tandem.protos.errors import ScorerError
from tandem.reward.sandbox.launcher import (
    BareLauncher,
    BubblewrapEachLauncher,
    BubblewrapLauncher,
    IsolationName,
    Launcher,
    Layout,
    ZygoteLauncher,
    layout_for,
)
from tandem.reward.sandbox.sandbox import Limits, Sandbox, SandboxError

START_SECONDS = 30.0
SPARE = 2
"""One for the answer, one for a test that calls it."""

_PROBE_LIMITS = Limits(cpu_seconds=10.0, wall_seconds=START_SECONDS, memory_bytes=1 << 30)
_KINDS: tuple[type[Launcher], ...] = (BubblewrapLauncher, ZygoteLauncher, BubblewrapEachLauncher)
"""Best kind first. The last one starts a Python per sandbox, for machines where the others get no namespaces."""

# Attempts that must fail in a sandbox. Prints the names of those that succeed.
_PROBE = """
import csv, json, os, socket
secret, port = {secret!r}, {port}
def tcp(): socket.create_connection(("127.0.0.1", port), timeout=5).close()
def write_outside():  # only asks whether it could, so that nothing is damaged
    if not any(os.access(path, os.W_OK) for path in ("/", "/usr/lib", os.path.dirname(os.__file__), os.__file__)):
        raise PermissionError
def read_files(): open(secret).close()
def read_environment(): open("/proc/" + str(os.getppid()) + "/environ").close()
def privileges(): os.chroot("/")
done = []
for attempt in (tcp, write_outside, read_files, read_environment, privileges):
    try:
        attempt()
        done.append(attempt.__name__)
    except OSError:
        pass
if os.getppid() != 1: done.append("other processes")
if os.getuid() == 0: done.append("root")
open("work", "w").close()
print(json.dumps(done))
"""
_SECCOMP_PROBE = "import socket\ntry:\n    socket.socket()\nexcept PermissionError:\n    print('refused')"


class SandboxPool:
    """Keeps `SPARE` sandboxes started. Each serves one answer and is discarded; taking one starts another. Thread-safe.
    A launcher that has ended is replaced. `seccomp`: whether system calls are filtered.
    """

    def __init__(self, launcher: Launcher, *, seccomp: bool) -> None:
        self.seccomp = seccomp
        self._launcher = launcher
        self._spare: deque[Sandbox] = deque()
        self._lock = threading.Lock()
        self._closed = False

    def take(self) -> Sandbox:
        """An unused sandbox, which the caller closes. Raises SandboxError if none starts with a new launcher either."""
        try:
            return self._ready()
        except SandboxError:
            with self._lock:
                if not self._closed:
                    self._end_all()
                    self._launcher = type(self._launcher)(self._launcher.layout)
            return self._ready()

    def close(self) -> None:
        """Ends the spare sandboxes and the launcher; may be called again."""
        with self._lock:
            self._closed = True
            self._end_all()

    def _ready(self) -> Sandbox:
        with self._lock:
            if self._closed:
                raise SandboxError("the sandboxes were closed")
            while len(self._spare) <= SPARE:
                self._spare.append(self._launcher.open(seccomp=self.seccomp))
            sandbox = self._spare.popleft()
        try:
            sandbox.await_ready(START_SECONDS)
        except BaseException:
            sandbox.close()
            raise
        return sandbox

    def _end_all(self) -> None:
        while self._spare:
            self._spare.popleft().close()
        self._launcher.close()


@dataclass(frozen=True, slots=True)
class Isolation:
    """The isolation in which code runs."""

    name: IsolationName
    seccomp: bool
    """Whether system calls are filtered."""
    faults: tuple[str, ...] = ()
    """Why better kinds do not work, one line each."""
    place: str = ""
    """The program that creates it, if it is not Tandem itself."""

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"{self.name}{place}, {'with' if self.seccomp else 'without'} seccomp"


_found: tuple[Isolation, type[Launcher]] | None = None
"""The isolation that was found, and its launcher class."""


def find_isolation() -> Isolation:
    """Returns the best isolation that works here. The first call takes a few tenths of a second; it is cached."""
    if _found is not None:
        return _found[0]
    launcher, isolation = _start(layout_for())
    launcher.close()
    return isolation


def open_sandboxes(packages: Sequence[str] = (), *, allow_unsandboxed: bool = False) -> SandboxPool:
    """Opens a pool of sandboxes with the best isolation that works here. The given packages can be imported in it.
    Raises ScorerError if none works and `allow_unsandboxed` is false, if it does not start this time, or if a package
    is not installed.
    """
    launcher, isolation = _start(layout_for(packages))
    if isolation.name == "none" and not allow_unsandboxed:
        told = f"this machine has no isolation for untrusted code ({'; '.join(isolation.faults)})"
        remedy = "allow_unsandboxed = true runs it without, if every answer can be trusted"
        raise ScorerError(f"{told}: `tandem doctor` says what would help; {remedy}")
    return SandboxPool(launcher, seccomp=isolation.seccomp)


def _start(layout: Layout) -> tuple[Launcher, Isolation]:
    """Starts a launcher of the best isolation, which the first call finds. Raises ScorerError if isolation that worked
    before does not start now: `allow_unsandboxed` is for machines without one.
    """
    global _found
    if _found is not None:
        isolation, known = _found
        try:
            return known(layout), isolation
        except SandboxError as error:
            raise ScorerError(f"the isolation of this machine does not start: {isolation.name}: {error}") from None
    faults: dict[str, None] = {}
    for kind in _KINDS:
        launcher: Launcher | None = None
        try:
            launcher = kind(layout)
            _found = Isolation(kind.name, _prove(launcher), tuple(faults), launcher.place), kind
            return launcher, _found[0]
        except SandboxError as error:
            if launcher is not None:
                launcher.close()
            faults[f"{kind.name}: {error}"] = None
    bare = BareLauncher(layout)
    _found = Isolation("none", _filters(bare), tuple(faults)), BareLauncher
    return bare, _found[0]


def _prove(launcher: Launcher) -> bool:
    """Whether the filter of system calls works. Raises SandboxError if the isolation fails even without the filter."""
    with tempfile.TemporaryDirectory(prefix="tandem-") as folder, socket.create_server(("127.0.0.1", 0)) as server:
        secret = Path(folder) / "secret"
        secret.write_text("secret")
        secret.chmod(0o644)
        Path(folder).chmod(0o755)
        probe = _PROBE.format(secret=str(secret), port=server.getsockname()[1])
        said = _said(launcher, probe, seccomp=False)
    try:
        got_through = json.loads(said)
    except ValueError:
        raise SandboxError(f"a program said {said!r:.200}") from None
    if got_through:
        raise SandboxError(f"it does not hold: {', '.join(got_through)}")
    return _filters(launcher)


def _filters(launcher: Launcher) -> bool:
    try:
        return _said(launcher, _SECCOMP_PROBE, seccomp=True).strip() == b"refused"
    except SandboxError:
        return False


def _said(launcher: Launcher, program: str, *, seccomp: bool) -> bytes:
    with closing(launcher.open(seccomp=seccomp)) as sandbox:
        sandbox.await_ready(START_SECONDS)
        outcome = sandbox.run("script", ["", program], _PROBE_LIMITS)
    return outcome.stdout if outcome.exit_code == 0 else outcome.stderr
