"""What a program in a sandbox can see of the service and the machine: environment, files, modules, privileges and
network. Every attack works without a sandbox (where that is harmless to show) and fails inside, both with namespaces
alone and with the seccomp filter.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.sandbox_runs import SECRET, Run, outside, said

# ---- environment and files ----

ENVIRONMENTS = """
import os
print(dict(os.environ))
for process in ("self", "1", str(os.getppid()), "{pid}"):
    try:
        print(open("/proc/" + process + "/environ", "rb").read())
    except OSError as error:
        print(type(error).__name__)
"""


def test_the_services_environment_is_invisible(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_SECRET", SECRET)
    program = ENVIRONMENTS.format(pid=os.getpid())
    assert SECRET in outside(program, tmp_path)
    assert SECRET not in said(run(program))
    assert "FileNotFoundError" in said(run(program)), "there is no /proc to read them from"


FILES = """
import os
for path in {paths}:
    try:
        print(open(path, "rb").read(40) if not os.path.isdir(path) else os.listdir(path))
    except OSError as error:
        print(type(error).__name__)
"""


def test_files_of_the_service_and_the_machine_are_invisible(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    ours = [str(secret), str(ROOT / "reward" / "scoring.py"), str(ROOT)]
    system = ["/etc/passwd", "/etc/hostname", "/home", "/var", "/proc", "/sys", "/usr/sbin", "/dev/shm", "/run"]
    program = FILES.format(paths=[*ours, *system, "/.dockerenv"])
    assert SECRET in outside(program, tmp_path)
    lines = set(said(run(program)).splitlines())
    assert lines <= {"FileNotFoundError", "[]"}, lines


def test_tandem_and_installed_packages_cannot_be_imported(run: Run) -> None:
    program = """
import importlib
for name in ("tandem", "tandem.reward.sandbox.inside.calls", "tandem.protos", "numpy", "pip", "grpc"):
    try:
        print(importlib.import_module(name))
    except ImportError:
        print("none")
"""
    assert set(said(run(program)).splitlines()) == {"none"}
    folder = "os.path.dirname(os.__file__) + '/site-packages'"
    listing = f"import os\nprint(os.path.isdir({folder}) and os.listdir({folder}))"
    assert said(run(listing)) in ("[]", "False")


def test_symbolic_links_lead_to_no_file_outside(run: Run, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET)
    program = f"""
import os
targets = {str(tmp_path / "secret")!r}, "/proc/1/root/etc/passwd", "../../../../../../etc/passwd", "/old/etc/passwd"
for number, target in enumerate(targets):
    os.symlink(target, f"link{{number}}")
    try:
        print(open(f"link{{number}}").read())
    except OSError as error:
        print(type(error).__name__)
"""
    assert set(said(run(program)).splitlines()) == {"FileNotFoundError"}


def test_programs_have_no_privileges(run: Run) -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(os.getuid(), os.getgid(), libc.prctl(39, 0, 0, 0, 0))
sets = (ctypes.c_uint32 * 6)()
libc.capget(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref(sets))
print(*sets)
null = lambda: os.mknod("/tmp/null", 0o020666, os.makedev(1, 3))
for attempt in (lambda: os.chroot("/tmp"), lambda: os.setuid(0), null, lambda: os.setgroups([0])):
    try:
        attempt()
        print("done")
    except OSError as error:
        print(type(error).__name__)
mounted = libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
print(mounted, libc.umount2(b"/tmp", 2), libc.mount(None, b"/", None, 0x20 | 0x1000, None))
"""
    lines = said(run(program)).splitlines()
    assert lines[0] == "65534 65534 1", "an unprivileged user who gets no new privileges"
    assert lines[1] == "0 0 0 0 0 0", "no capability, not even in its own namespaces"
    assert "done" not in lines
    assert lines[-1] == "-1 -1 -1"


# ---- network ----

DIAL = """
import socket
addresses = ("127.0.0.1", {port}), {path!r}, {abstract!r}
for family, address in zip((socket.AF_INET, socket.AF_UNIX, socket.AF_UNIX), addresses):
    try:
        with socket.socket(family) as dialled:
            dialled.settimeout(5)
            dialled.connect(address)
            print("connected")
    except OSError as error:
        print(type(error).__name__)
"""


def test_sockets_of_the_machine_are_unreachable(run: Run, tmp_path: Path) -> None:
    """TCP, a socket in a folder (as Redis has), and an abstract socket, which only a network namespace hides."""
    abstract = f"\0tandem-test-{os.getpid()}"
    path = str(tmp_path / "redis.sock")
    with (
        socket.create_server(("127.0.0.1", 0)) as tcp,
        socket.socket(socket.AF_UNIX) as file,
        socket.socket(socket.AF_UNIX) as bare,
    ):
        file.bind(path)
        bare.bind(abstract)
        for server in (file, bare):
            server.listen()
        program = DIAL.format(port=tcp.getsockname()[1], path=path, abstract=abstract)
        assert outside(program, tmp_path).split() == ["connected"] * 3
        assert "connected" not in said(run(program)).split()


def test_there_is_no_external_network_interface(run: Run, filtered: bool) -> None:
    program = """
import socket
try:
    print(socket.if_nameindex())
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("8.8.8.8", 53))
    print("sent")
except OSError as error:
    print(type(error).__name__, error.strerror)
"""
    lines = said(run(program)).splitlines()
    if filtered:
        assert lines == ["PermissionError Operation not permitted"]
    else:
        assert lines == ["[(1, 'lo')]", "OSError Network is unreachable"]
