"""What a program in a sandbox can see of the service and the machine, and what happens if it uses too many processes,
threads or files, too much memory, output or time. Every attack that is harmless to show works without a sandbox.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tandem.reward.sandbox.inside.zygote import DISK_BYTES
from tandem.reward.sandbox.sandbox import Limits, Sandbox
from tests.support.paths import ROOT
from tests.support.sandbox_runs import LIMITS, SECRET, Launcher, Run, alive, inside_of, outside, said, settles

# ---- environment and files ----

ENVIRONMENTS = """
import os
print(dict(os.environ))
for process in ("self", "1", str(os.getppid()), "{pid}"):
    attempt(lambda: open("/proc/" + process + "/environ", "rb").read())
"""


def test_the_services_environment_is_invisible(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TANDEM_TEST_SECRET", SECRET)
    program = ENVIRONMENTS.format(pid=os.getpid())
    assert SECRET in outside(program, tmp_path)
    assert SECRET not in said(run(program))
    assert "FileNotFoundError" in said(run(program)), "there is no /proc to read them from"


FILES = """
import os
for number, target in enumerate({targets}):
    os.symlink(target, f"link{{number}}")
for path in [*{paths}, "link0", "link1", "link2", "link3"]:
    attempt(lambda: open(path, "rb").read(40) if not os.path.isdir(path) else os.listdir(path))
"""


def test_files_of_the_service_and_the_machine_are_invisible(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    ours = [str(secret), str(ROOT / "reward" / "scoring.py"), str(ROOT)]
    system = ["/etc/passwd", "/etc/hostname", "/home", "/var", "/proc", "/sys", "/usr/sbin", "/dev/shm", "/run"]
    targets = str(secret), "/proc/1/root/etc/passwd", "../../../../../../etc/passwd", "/old/etc/passwd"
    program = FILES.format(paths=[*ours, *system, "/.dockerenv"], targets=targets)
    assert outside(program, tmp_path).count(SECRET) == 2, "directly and over a symbolic link"
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


def test_programs_have_no_privileges(run: Run) -> None:
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(os.getuid(), os.getgid(), libc.prctl(39, 0, 0, 0, 0))
sets = (ctypes.c_uint32 * 6)()
libc.capget(ctypes.byref((ctypes.c_uint32 * 2)(0x20080522, 0)), ctypes.byref(sets))
print(*sets)
null = lambda: os.mknod("/tmp/null", 0o020666, os.makedev(1, 3))
for act in (lambda: os.chroot("/tmp"), lambda: os.setuid(0), null, lambda: os.setgroups([0])):
    attempt(act)
mounted = libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)
print(mounted, libc.umount2(b"/tmp", 2), libc.mount(None, b"/", None, 0x20 | 0x1000, None))
"""
    lines = said(run(program)).splitlines()
    assert lines[0] == "65534 65534 1", "an unprivileged user who gets no new privileges"
    assert lines[1] == "0 0 0 0 0 0", "no capability, not even in its own namespaces"
    assert "None" not in lines
    assert lines[-1] == "-1 -1 -1"


# ---- network ----

DIAL = """
import socket
def dial(family, address):
    with socket.socket(family) as dialled:
        dialled.settimeout(5)
        dialled.connect(address)
        return "connected"
attempt(lambda: dial(socket.AF_INET, ("127.0.0.1", {port})))
for path in {path!r}, {abstract!r}:
    attempt(lambda: dial(socket.AF_UNIX, path))
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


# ---- excess ----

FEW = Limits(cpu_seconds=10.0, wall_seconds=40.0, memory_bytes=4 << 30, threads=20)

FORK_BOMB = """
import os, time
born = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        born += 1
    except OSError as error:
        print(born, type(error).__name__, flush=True)
        break
    if born > 500:
        print(born, "unlimited", flush=True)
        break
"""


def test_a_fork_bomb_is_contained(launcher: Launcher, sandbox: Sandbox, run: Run, filtered: bool) -> None:
    before = inside_of(launcher, sandbox)
    born, why = said(run(FORK_BOMB, FEW)).split()
    if filtered:
        assert (born, why) == ("0", "PermissionError")
    else:
        assert int(born) <= FEW.threads + 1 and why == "BlockingIOError"
    settles(lambda: inside_of(launcher, sandbox) <= before, "children survived")
    assert alive(sandbox)


def test_unlimited_threads_are_refused(sandbox: Sandbox, run: Run) -> None:
    program = """
import threading, time
try:
    for number in range(10_000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError:
    print(number)
"""
    assert int(said(run(program, FEW))) <= 21 and alive(sandbox)


@pytest.mark.parametrize(
    "bomb",
    [
        "x = bytearray(600 << 20)",
        "x = []\nwhile True:\n    x.append('word' * 100_000)",
        "import mmap\nfor one in [mmap.mmap(-1, 100 << 20) for _ in range(8)]: one[::4096] = b'x' * (len(one) // 4096)",
        "import threading\nx = lambda: bytearray(600 << 20)\nfor _ in range(4): threading.Thread(None, x).start()\nx()",
    ],
)
def test_a_memory_bomb_fails_as_memory(sandbox: Sandbox, run: Run, bomb: str) -> None:
    outcome = run(bomb)
    assert outcome.exit_code != 0 and outcome.failure in ("memory", "error"), outcome
    assert alive(sandbox)


def test_memory_outside_process_limits_is_bounded(run: Run, filtered: bool) -> None:
    """Anonymous files and System V shared memory do not count towards process limits; the filter denies them."""
    if not filtered:
        pytest.skip("without the filter of system calls these are bounded by files' sizes and numbers only")
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.memfd_create(b"x", 0), libc.shmget(0, 1 << 20, 0o1600), libc.mq_open(b"/x", 0o102, 0o600, None))
"""
    assert said(run(program)) == "-1 -1 -1"


@pytest.mark.parametrize("descriptor", [1, 2])
def test_endless_output_is_stopped(sandbox: Sandbox, run: Run, descriptor: int) -> None:
    outcome = run(f"import os\nwhile True:\n    os.write({descriptor}, b'word ' * 1000)")
    assert outcome.failure == "output" and len(outcome.stdout) <= LIMITS.output_bytes and alive(sandbox)


def test_unlimited_files_are_refused(sandbox: Sandbox, run: Run) -> None:
    program = """
import os
opened = []
try:
    while True:
        opened.append(open("/dev/null"))
except OSError as error:
    print(len(opened), error.strerror)
opened.clear()
written = 0
try:
    for number in range(100):
        with open(f"large{number}", "wb", buffering=0) as file:
            while True:
                try:
                    written += file.write(bytes(1 << 20))
                except OSError as error:
                    if error.errno == 28:
                        raise
                    break
except OSError as error:
    print(written, error.strerror)
"""
    limits = Limits(cpu_seconds=10.0, wall_seconds=40.0, open_files=32, file_bytes=3 << 20)
    (opened, why), (written, full) = (line.split(maxsplit=1) for line in said(run(program, limits)).splitlines())
    assert int(opened) < 32 and "open files" in why
    assert int(written) <= DISK_BYTES and "No space" in full
    assert not sandbox.clean, "what it wrote is no longer a fresh folder, and the scorer takes another sandbox"


DEAF = """
import signal
for number in range(1, 32):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
while True: pass
"""


@pytest.mark.parametrize(
    "program",
    [
        "while True: pass",
        "import time\ntime.sleep(600)",
        DEAF,
        "import threading\nfor _ in range(8): threading.Thread(target=lambda: sum(iter(int, 1))).start()",
        "import atexit, time\natexit.register(time.sleep, 600)",
        "import os, time\nfor descriptor in range(3): os.close(descriptor)\ntime.sleep(600)",
        "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    ],
)
def test_an_endless_program_is_stopped(launcher: Launcher, sandbox: Sandbox, run: Run, program: str) -> None:
    before = inside_of(launcher, sandbox)
    assert run(program, Limits(cpu_seconds=0.4, wall_seconds=0.8, threads=16)).failure == "time"
    settles(lambda: inside_of(launcher, sandbox) <= before, "a child survived")
    assert alive(sandbox)


def test_a_hang_does_not_delay_another_sandbox(open_one: Callable[[], Sandbox]) -> None:
    hanging, working = open_one(), open_one()
    hanging.start("script", ["", "while True: pass"], Limits(cpu_seconds=30.0, wall_seconds=60.0))
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(alive(working)))
    thread.start()
    thread.join(timeout=30)
    assert done == [True]
    hanging.stop()
    assert hanging.outcome().stopped == "asked"
