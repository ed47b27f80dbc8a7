"""Untrusted programs that attack the machine, the service, one another: each works without a sandbox (where that is harmless to show),
and none does within, neither behind namespaces alone nor with the filter of system calls.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from reward.sandbox import isolation
from reward.sandbox.inside import seccomp as filter_program
from reward.sandbox.launcher import BareLauncher, BubblewrapLauncher, ZygoteLauncher
from reward.sandbox.layout import layout_for
from reward.sandbox.limits import Limits, Outcome
from reward.sandbox.sandbox import Sandbox, SandboxError

ROOT = Path(__file__).resolve().parents[1]
DISK_BYTES = 8 << 20
LIMITS = Limits(cpu_seconds=10.0, wall_seconds=40.0, memory_bytes=512 << 20, output_bytes=1 << 20)
MANY = Limits(cpu_seconds=10.0, wall_seconds=40.0, memory_bytes=512 << 20, processes=8, threads=8)
KINDS: dict[str, type[ZygoteLauncher] | type[BubblewrapLauncher]] = {
    "namespaces": ZygoteLauncher,
    "bubblewrap": BubblewrapLauncher,
}
SECRET = "a key that no program may see"

Run = Callable[..., Outcome]


@pytest.fixture(scope="module", params=list(KINDS))
def launcher(request: pytest.FixtureRequest) -> Iterator[ZygoteLauncher | BubblewrapLauncher]:
    os.environ["TANDEM_TEST_SECRET"] = SECRET
    try:
        made = KINDS[request.param](layout_for(), DISK_BYTES)
        first = made.open(seccomp=False)
        first.await_ready(60.0)
        first.close()
    except SandboxError as error:
        pytest.skip(f"{request.param} does not work here: {error}")
    finally:
        del os.environ["TANDEM_TEST_SECRET"]
    isolation._prove(made)  # works, so it must hold
    yield made
    made.close()


@pytest.fixture(params=["filtered", "unfiltered"])
def filtered(request: pytest.FixtureRequest) -> bool:
    if request.param == "filtered" and not filter_program.available():
        pytest.skip(f"no filter of system calls is known for {os.uname().machine}")
    return bool(request.param == "filtered")


@pytest.fixture
def open_one(launcher: ZygoteLauncher, filtered: bool) -> Iterator[Callable[[], Sandbox]]:
    opened: list[Sandbox] = []

    def make() -> Sandbox:
        opened.append(launcher.open(seccomp=filtered))
        opened[-1].await_ready(60.0)
        return opened[-1]

    yield make
    for sandbox in opened:
        sandbox.close()


@pytest.fixture
def sandbox(open_one: Callable[[], Sandbox]) -> Sandbox:
    return open_one()


@pytest.fixture
def run(sandbox: Sandbox) -> Run:
    def go(program: str, limits: Limits = LIMITS) -> Outcome:
        return sandbox.run("script", ["", program], limits)

    return go


def outside(program: str, folder: Path) -> str:
    """What the same program prints where nothing holds it."""
    command = [sys.executable, "-I", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder, check=False)
    return done.stdout + done.stderr


def said(outcome: Outcome) -> str:
    assert outcome.exit_code == 0, outcome.stderr.decode()
    return outcome.stdout.decode().strip()


def alive(sandbox: Sandbox) -> bool:
    """Whether a sandbox still runs programs as if nothing had happened."""
    return said(sandbox.run("script", ["", "print('still here')"], LIMITS)) == "still here"


def inside_of(launcher: ZygoteLauncher | BubblewrapLauncher, sandbox: Sandbox) -> set[int]:
    """Numbers of all processes of the machine that belong to a launcher's sandboxes."""
    started = launcher._process if isinstance(launcher, ZygoteLauncher) else sandbox._process
    assert started is not None
    return {process.pid for process in psutil.Process(started.pid).children(recursive=True)}


def settles(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the service's user."""
    process = subprocess.Popen(["sleep", "600"])
    yield process
    process.kill()
    process.wait(timeout=30)


# ---- what it can see ----

ENVIRONMENTS = """
import os
print(dict(os.environ))
for process in ("self", "1", str(os.getppid()), "{pid}"):
    try:
        print(open("/proc/" + process + "/environ", "rb").read())
    except OSError as error:
        print(type(error).__name__)
"""


def test_the_environment_of_the_service(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_files_of_the_service_and_the_machine(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text(SECRET)
    secret.chmod(0o644)
    paths = [
        str(secret),
        str(ROOT / "reward" / "code.py"),
        str(ROOT),
        "/etc/passwd",
        "/etc/hostname",
        "/home",
        "/var",
        "/proc",
        "/sys",
    ]
    program = FILES.format(paths=[*paths, "/usr/sbin", "/dev/shm", "/run", "/.dockerenv"])
    assert SECRET in outside(program, tmp_path)
    lines = set(said(run(program)).splitlines())
    assert lines <= {"FileNotFoundError", "[]"}, lines


def test_tandem_and_what_is_installed_cannot_be_imported(run: Run) -> None:
    program = """
import importlib
for name in ("reward", "services", "protos", "numpy", "pip", "grpc"):
    try:
        print(importlib.import_module(name))
    except ImportError:
        print("none")
"""
    assert set(said(run(program)).splitlines()) == {"none"}
    listing = "import os\nfolder = os.path.dirname(os.__file__) + '/site-packages'\nprint(os.path.isdir(folder) and os.listdir(folder))"
    assert said(run(listing)) in ("[]", "False")


def test_a_symbolic_link_leads_nowhere(run: Run, tmp_path: Path) -> None:
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


def test_the_user_has_no_privileges(run: Run) -> None:
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
print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), libc.umount2(b"/tmp", 2), libc.mount(None, b"/", None, 0x20 | 0x1000, None))
"""
    lines = said(run(program)).splitlines()
    assert lines[0] == "65534 65534 1", "an unprivileged user who gets no new privileges"
    assert lines[1] == "0 0 0 0 0 0", "no capability, not even in its own namespaces"
    assert "done" not in lines
    assert lines[-1] == "-1 -1 -1"


# ---- network ----

DIAL = """
import socket
for family, address in ((socket.AF_INET, ("127.0.0.1", {port})), (socket.AF_UNIX, {path!r}), (socket.AF_UNIX, {abstract!r})):
    try:
        with socket.socket(family) as dialled:
            dialled.settimeout(5)
            dialled.connect(address)
            print("connected")
    except OSError as error:
        print(type(error).__name__)
"""


def test_sockets_of_the_machine(run: Run, tmp_path: Path) -> None:
    """TCP, a socket in a folder (as Redis has), and one without a file, which only a network namespace keeps away."""
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


def test_there_is_no_interface_to_the_outside(run: Run, filtered: bool) -> None:
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


# ---- other processes ----


def test_signals_to_others(sandbox: Sandbox, run: Run, victim: subprocess.Popen[bytes], tmp_path: Path) -> None:
    program = f"""
import os, signal
for process in (1, {os.getpid()}, {victim.pid}, os.getppid(), -{os.getpgid(0)}):
    for number in range(1, 65):
        try:
            os.kill(process, number)
        except OSError as error:
            pass
print("alive")
"""
    assert said(run(program)) == "alive"
    assert victim.poll() is None and alive(sandbox)
    outside(f"import os; os.kill({victim.pid}, 9)", tmp_path)
    assert victim.wait(timeout=30) == -signal.SIGKILL


def test_killing_everything_there_is(sandbox: Sandbox, run: Run) -> None:
    assert run("import os\nos.kill(-1, 9)\nprint('alive')").exit_code in (0, 1, -signal.SIGKILL)
    assert alive(sandbox)


def test_stopping_oneself_is_a_hang(sandbox: Sandbox, run: Run) -> None:
    outcome = run("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", Limits(cpu_seconds=5.0, wall_seconds=0.5))
    assert outcome.failure == "time" and alive(sandbox)


PTRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
PTRACE_ATTACH, PTRACE_DETACH = 16, 17
target = {target}
print(libc.ptrace(PTRACE_ATTACH, target, 0, 0))
buffer = ctypes.create_string_buffer(8)
class Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
mine, theirs = Part(ctypes.addressof(buffer), 8), Part({address}, 8)
print(libc.process_vm_readv(target, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0))
"""


def test_looking_into_the_process_that_keeps_the_sandbox(
    sandbox: Sandbox, run: Run, victim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    ours = ctypes.create_string_buffer(b"12345678")
    shown = outside(PTRACE.format(target=victim.pid, address=ctypes.addressof(ours)), tmp_path).split()
    assert shown[0] == "0", "it can attach to another process of the same user"
    assert said(run(PTRACE.format(target=1, address=ctypes.addressof(ours)))).split() == ["-1", "-1"]
    assert alive(sandbox)


def test_lowering_the_limits_of_the_process_that_keeps_the_sandbox(sandbox: Sandbox, filtered: bool, run: Run) -> None:
    if not filtered:
        pytest.skip("one user's processes may set one another's limits: the filter of system calls is what refuses it")
    program = "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))"
    assert b"PermissionError" in run(program).stderr and alive(sandbox)


DAEMON = """
import os, sys, time
def leave():
    if os.fork():
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for descriptor in range(3):
        os.close(descriptor)
    while True:
        time.sleep(0.05)
        open(os.path.join({folder!r}, "beat"), "w").write(str(os.getpid()))
try:
    leave()
except OSError as error:
    print(type(error).__name__)
time.sleep(0.5)
"""


def test_a_daemon_does_not_survive_its_run(
    launcher: ZygoteLauncher, sandbox: Sandbox, run: Run, filtered: bool, tmp_path: Path
) -> None:
    outside(DAEMON.format(folder=str(tmp_path)), tmp_path)
    beat = tmp_path / "beat"
    settles(lambda: beat.exists() and beat.read_text() != "", "the daemon does not beat even outside")
    daemon = int(beat.read_text())
    assert psutil.pid_exists(daemon), "outside a sandbox it lives on"
    os.kill(daemon, signal.SIGKILL)

    before = inside_of(launcher, sandbox)
    outcome = run(DAEMON.format(folder="/tmp"), MANY)
    assert outcome.exit_code == 0 and not outcome.stdout and not sandbox.clean, "it did start and beat"
    settles(lambda: inside_of(launcher, sandbox) <= before, "a daemon survived its run")
    if filtered:  # with one process allowed, it does not even start
        assert said(run(DAEMON.format(folder="/tmp"))) == "PermissionError"


# ---- too much of everything ----

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


def test_a_fork_bomb(launcher: ZygoteLauncher, sandbox: Sandbox, run: Run, filtered: bool) -> None:
    before = inside_of(launcher, sandbox)
    born, why = said(run(FORK_BOMB, MANY)).split()
    assert int(born) <= MANY.processes + MANY.threads and why == "BlockingIOError"
    settles(lambda: inside_of(launcher, sandbox) <= before, "children survived")
    if filtered:
        assert said(run(FORK_BOMB)) == "0 PermissionError"
    assert alive(sandbox)


def test_a_fork_bomb_that_never_stops_ends_with_its_time(launcher: ZygoteLauncher, sandbox: Sandbox, run: Run) -> None:
    before = inside_of(launcher, sandbox)
    program = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    many = Limits(cpu_seconds=1.0, wall_seconds=2.0, processes=8, threads=8)
    assert run(program, many).failure == "time"
    settles(lambda: inside_of(launcher, sandbox) <= before, "children survived")
    assert alive(sandbox)


def test_threads_without_end(sandbox: Sandbox, run: Run) -> None:
    program = """
import threading, time
try:
    for number in range(10_000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
except RuntimeError:
    print(number)
"""
    few = Limits(cpu_seconds=10.0, wall_seconds=40.0, threads=20, memory_bytes=4 << 30)
    assert int(said(run(program, few))) <= 21 and alive(sandbox)


@pytest.mark.parametrize(
    "bomb",
    [
        "x = bytearray(600 << 20)",
        "x = []\nwhile True:\n    x.append('word' * 100_000)",
        "import mmap\nx = [mmap.mmap(-1, 100 << 20) for _ in range(8)]\nfor one in x: one[::4096] = b'x' * (len(one) // 4096)",
        "import threading\nfor _ in range(4): threading.Thread(target=lambda: bytearray(600 << 20)).start()\nbytearray(600 << 20)",
    ],
)
def test_a_memory_bomb(sandbox: Sandbox, run: Run, bomb: str) -> None:
    outcome = run(bomb)
    assert outcome.exit_code != 0 and outcome.memory_bytes < 600 << 20
    assert outcome.failure in ("memory", "error"), outcome
    assert alive(sandbox)


def test_memory_without_a_limit_of_its_own(run: Run, filtered: bool) -> None:
    """Files without a name and segments of System V count for no process: with the filter they are not to be had."""
    if not filtered:
        pytest.skip("without the filter of system calls these are bounded by files' sizes and numbers only")
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(libc.memfd_create(b"x", 0), libc.shmget(0, 1 << 20, 0o1600), libc.mq_open(b"/x", 0o102, 0o600, None))
"""
    assert said(run(program)) == "-1 -1 -1"


@pytest.mark.parametrize("descriptor", [1, 2])
def test_endless_output(sandbox: Sandbox, run: Run, descriptor: int) -> None:
    outcome = run(f"import os\nwhile True:\n    os.write({descriptor}, b'word ' * 1000)")
    assert outcome.failure == "output" and len(outcome.stdout) <= LIMITS.output_bytes and alive(sandbox)


def test_files_without_end(sandbox: Sandbox, run: Run) -> None:
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


WRITING = """
import os
for path in {paths}:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_APPEND))
        print("opened", path)
    except OSError as error:
        print(type(error).__name__)
print([path for path in ("/", "/usr/lib", "/etc", "/dev", "/dev/shm", os.path.dirname(os.__file__)) if os.access(path, os.W_OK)])
open("/dev/null", "w").write("x")
"""


def test_writing_outside_the_working_folder(run: Run, tmp_path: Path) -> None:
    """Nothing is written even where a sandbox leaks: files are opened, folders asked."""
    (tmp_path / "x").touch()
    (tmp_path / "x").chmod(0o666)
    tmp_path.chmod(0o777)
    program = WRITING.format(paths=[str(tmp_path / "x"), os.__file__, "/etc/ld.so.cache"])
    lines = said(run(program)).splitlines()
    assert set(lines[:-1]) <= {"FileNotFoundError", "PermissionError", "OSError"} and lines[-1] == "[]"
    assert "opened" in outside(program, tmp_path)


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
    ],
)
def test_a_program_without_end(sandbox: Sandbox, run: Run, program: str) -> None:
    assert run(program, Limits(cpu_seconds=0.5, wall_seconds=1.5)).failure == "time" and alive(sandbox)


# ---- one another ----


def test_sandboxes_see_nothing_of_one_another(open_one: Callable[[], Sandbox]) -> None:
    """Two at the same time: files, processes, sockets without a file, segments of shared memory."""
    abstract = f"\0tandem-between-{os.getpid()}"
    first, second = open_one(), open_one()
    host = f"""
import ctypes, os, socket, time
open("mine", "w").write("x")
libc = ctypes.CDLL(None)
libc.shmget(4711, 4096, 0o1666)
try:
    server = socket.socket(socket.AF_UNIX); server.bind({abstract!r}); server.listen()
except OSError:
    pass
os.write(1, b"listening")
time.sleep(600)
"""
    guest = f"""
import ctypes, os, socket
print(os.listdir("."), ctypes.CDLL(None).shmget(4711, 4096, 0o666))
try:
    socket.socket(socket.AF_UNIX).connect({abstract!r})
    print("connected")
except OSError as error:
    print(type(error).__name__)
for process in range(2, 200):
    try:
        os.kill(process, 0)
        if process != os.getpid(): print("sees", process)
    except OSError:
        pass
"""
    first.start("script", ["", host], Limits(cpu_seconds=10.0, wall_seconds=60.0))
    time.sleep(0.5)
    lines = said(second.run("script", ["", guest], LIMITS)).splitlines()
    assert lines[0] == "[] -1" and lines[1] in ("ConnectionRefusedError", "PermissionError") and lines[2:] == []
    first.stop()
    outcome = first.outcome()
    assert outcome.stopped == "asked" and outcome.stdout == b"listening"


def test_runs_of_one_sandbox_share_no_memory(run: Run) -> None:
    said(run("import math, builtins, sys\nmath.pi = 3\nbuiltins.print = None\nsys.modules['json'] = None"))
    assert said(run("import math, json\nprint(math.pi > 3.1, json.dumps(1))")) == "True 1"


# ---- the end of the service ----

SERVICE = """
import sys
sys.path.insert(0, {root!r})
from reward.sandbox.launcher import {kind}
from reward.sandbox.layout import layout_for
from reward.sandbox.limits import Limits
made = {kind}(layout_for(), 1 << 20)
sandbox = made.open(seccomp=False)
sandbox.await_ready(60.0)
sandbox.start("script", ["", {program!r}], Limits(cpu_seconds=600.0, wall_seconds=600.0, processes=8))
print("started", flush=True)
sandbox.outcome()
"""


def test_everything_ends_with_a_service_that_is_killed(launcher: ZygoteLauncher) -> None:
    program = "import os, signal, time\nos.fork()\nos.fork()\nos.setsid() if os.getpid() != 2 else None\nwhile True: time.sleep(1)"
    code = SERVICE.format(root=str(ROOT), kind=type(launcher).__name__, program=program)
    service = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert service.stdout is not None and service.stdout.readline() == b"started\n"
        settles(lambda: len(psutil.Process(service.pid).children(recursive=True)) >= 5, "its programs do not start")
        family = psutil.Process(service.pid).children(recursive=True)
    finally:
        service.kill()
        service.wait(timeout=30)
        if service.stdout is not None:
            service.stdout.close()
    ended = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    settles(
        lambda: not [one for one in family if one.is_running() and one.status() not in ended], "some of it survived"
    )


# ---- the filter of system calls ----


def test_every_refused_call_is_refused(launcher: ZygoteLauncher) -> None:
    if not filter_program.available():
        pytest.skip("no filter of system calls for this machine")
    column = filter_program._ARCHITECTURES[os.uname().machine][1]
    numbers = {name: filter_program._REFUSED[name][column] for name in filter_program.REFUSED}
    program = f"""
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
found = {{}}
for name, number in { ({name: number for name, number in numbers.items() if number is not None})!r}.items():
    ctypes.set_errno(0)
    found[name] = [libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0), ctypes.get_errno()]
for name, number in {{"a call of x32": 0x40000027, "a call of the future": 9999, "clone3": 435}}.items():
    found[name] = [libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0), ctypes.get_errno()]
print(json.dumps(found))
"""
    found = isolation._said(launcher, program, seccomp=True)
    results = json.loads(found)
    unknown = {name: results.pop(name) for name in ("a call of x32", "a call of the future", "clone3")}
    assert {name: result for name, result in results.items() if result != [-1, 1]} == {}
    assert set(map(tuple, unknown.values())) == {(-1, 38)}
    assert len(results) >= 75


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls of another word size, as an instruction of x86")
def test_calls_of_another_word_size_end_the_program(launcher: ZygoteLauncher) -> None:
    program = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # getpid by int 0x80
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
    sandbox = launcher.open(seccomp=True)
    try:
        sandbox.await_ready(60.0)
        outcome = sandbox.run("script", ["", program], LIMITS)
        assert outcome.exit_code == -signal.SIGSYS and not outcome.stdout
        assert alive(sandbox)
    finally:
        sandbox.close()


# ---- what is left without isolation ----


def test_without_isolation_there_are_limits_a_clean_environment_and_no_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TANDEM_TEST_SECRET", SECRET)
    (tmp_path / "kept").write_text("x")
    sandbox = BareLauncher(layout_for(), DISK_BYTES).open(seccomp=filter_program.available())
    try:
        sandbox.await_ready(60.0)
        go = partial(sandbox.run, "script", limits=LIMITS)
        folder = said(go(["", "import os\nprint(os.getcwd())"]))
        assert SECRET not in said(go(["", "import os\nprint(os.environ)"]))
        assert go(["", "x = bytearray(600 << 20)"]).failure == "memory"
        assert (
            sandbox.run("script", ["", "while True: pass"], Limits(cpu_seconds=0.5, wall_seconds=5.0)).failure == "time"
        )
        assert go(["", "import os\nwhile True: os.write(1, b'x' * 1000)"]).failure == "output"
        said(go(["", f"import os\nos.symlink({str(tmp_path)!r}, 'link')"]))
        assert alive(sandbox)
    finally:
        sandbox.close()
    assert not Path(folder).exists() and (tmp_path / "kept").exists(), "a link in the working folder is not followed"


def test_without_isolation_a_daemon_ends_all_the_same(tmp_path: Path) -> None:
    sandbox = BareLauncher(layout_for(), DISK_BYTES).open(seccomp=False)
    try:
        sandbox.await_ready(60.0)
        assert sandbox.run("script", ["", DAEMON.format(folder=str(tmp_path))], MANY).exit_code == 0
        daemon = int((tmp_path / "beat").read_text())
        settles(lambda: not psutil.pid_exists(daemon), "it lives")
    finally:
        sandbox.close()


def test_a_hang_does_not_hold_another_sandbox(open_one: Callable[[], Sandbox]) -> None:
    hanging, working = open_one(), open_one()
    hanging.start("script", ["", "while True: pass"], Limits(cpu_seconds=30.0, wall_seconds=60.0))
    done: list[bool] = []
    thread = threading.Thread(target=lambda: done.append(alive(working)))
    thread.start()
    thread.join(timeout=30)
    assert done == [True]
    hanging.stop()
    assert hanging.outcome().stopped == "asked"
