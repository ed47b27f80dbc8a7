"""Programs that attack the machine, the service and each other. Every attack works without a sandbox (where that is
harmless to show) and fails inside, with namespaces alone and with the seccomp filter. And the calls that it refuses.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tandem.reward.sandbox import isolation
from tandem.reward.sandbox.inside import seccomp
from tandem.reward.sandbox.sandbox import Limits, Sandbox
from tests.support.paths import ROOT
from tests.support.processes import has_ended
from tests.support.sandbox_runs import ATTEMPT, DAEMON, LIMITS, Launcher, Run, alive, inside_of, outside, said, settles

# ---- other processes ----


def test_programs_cannot_signal_other_processes(
    sandbox: Sandbox, run: Run, victim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
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


def test_killing_all_processes_kills_only_the_program(sandbox: Sandbox, run: Run) -> None:
    assert run("import os\nos.kill(-1, 9)\nprint('alive')").exit_code in (0, 1, -signal.SIGKILL)
    assert alive(sandbox)


WITHIN_REACH = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
PTRACE_ATTACH = 16
def is_open(descriptor):
    try:
        return os.fstat(descriptor) is not None
    except OSError:
        return False
print([descriptor for descriptor in range(1024) if is_open(descriptor)])
buffer = ctypes.create_string_buffer(8)
class Part(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
mine, theirs = Part(ctypes.addressof(buffer), 8), Part({address}, 8)
for process in {{*{processes}}} - {{os.getpid()}}:
    if libc.process_vm_readv(process, ctypes.byref(mine), 1, ctypes.byref(theirs), 1, 0) > 0:
        print("reads", process)
if libc.ptrace(PTRACE_ATTACH, {target}, 0, 0) == 0:
    print("attaches")
"""


def test_programs_cannot_reach_the_first_and_the_judging_process(
    sandbox: Sandbox, run: Run, victim: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """They have no descriptor of those, and cannot read their memory: the expected results and the answer token."""
    address = ctypes.addressof(ctypes.create_string_buffer(b"12345678"))
    shown = outside(WITHIN_REACH.format(address=address, processes=[], target=victim.pid), tmp_path)
    assert "attaches" in shown, "it can attach to another process of the same user"
    program = WITHIN_REACH.format(address=address, processes=[*range(1, 3000), os.getpid()], target=1)
    assert said(run(program)).splitlines() == ["[0, 1, 2]"]
    assert alive(sandbox)


def test_programs_cannot_change_the_limits_of_the_first_process(sandbox: Sandbox, filtered: bool, run: Run) -> None:
    if not filtered:
        pytest.skip("one user's processes may set one another's limits: the filter of system calls is what refuses it")
    program = "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))"
    assert b"PermissionError" in run(program).stderr and alive(sandbox)


def test_a_daemon_does_not_survive_its_run(
    launcher: Launcher, sandbox: Sandbox, run: Run, filtered: bool, tmp_path: Path
) -> None:
    outside(DAEMON.format(folder=str(tmp_path)), tmp_path)
    beat = tmp_path / "beat"
    settles(lambda: beat.exists() and beat.read_text() != "", "the daemon does not beat even outside")
    daemon = int(beat.read_text())
    assert psutil.pid_exists(daemon), "outside a sandbox it lives on"
    os.kill(daemon, signal.SIGKILL)

    before = inside_of(launcher, sandbox)
    outcome = run(DAEMON.format(folder="/tmp"))
    if filtered:  # the filter allows one process, so the daemon does not start
        assert said(outcome) == "PermissionError"
    else:
        assert outcome.exit_code == 0 and not outcome.stdout and not sandbox.clean, "it did start and beat"
    settles(lambda: inside_of(launcher, sandbox) <= before, "a daemon survived its run")


WRITING = """
import os
for path in {paths}:
    attempt(lambda: os.open(path, os.O_WRONLY | os.O_APPEND))
paths = ("/", "/usr/lib", "/etc", "/dev", "/dev/shm", os.path.dirname(os.__file__))
print([path for path in paths if os.access(path, os.W_OK)])
open("/dev/null", "w").write("x")
"""


def test_programs_cannot_write_outside_the_working_folder(run: Run, tmp_path: Path) -> None:
    """The program only opens files and checks folder permissions, so nothing is written even if the sandbox leaks."""
    (tmp_path / "x").touch()
    (tmp_path / "x").chmod(0o666)
    tmp_path.chmod(0o777)
    program = WRITING.format(paths=[str(tmp_path / "x"), os.__file__, "/etc/ld.so.cache"])
    lines = said(run(program)).splitlines()
    assert set(lines[:-1]) <= {"FileNotFoundError", "PermissionError", "OSError"} and lines[-1] == "[]"
    assert outside(program, tmp_path)[0].isdigit(), "a descriptor"


# ---- other sandboxes ----


def test_sandboxes_are_isolated_from_each_other(open_one: Callable[[], Sandbox]) -> None:
    """Two sandboxes at the same time: files, processes, abstract sockets, and shared memory segments."""
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
os.write(3, b"x")
time.sleep(600)
"""
    guest = f"""
import ctypes, os, socket
print(os.listdir("."), ctypes.CDLL(None).shmget(4711, 4096, 0o666))
attempt(lambda: socket.socket(socket.AF_UNIX).connect({abstract!r}))
for process in range(2, 200):
    try:
        os.kill(process, 0)
        if process != os.getpid(): print("sees", process)
    except OSError:
        pass
"""
    begun, theirs = socket.socketpair()
    with begun:
        with theirs:
            first.start("script", ["", host], Limits(cpu_seconds=10.0, wall_seconds=60.0), line=theirs)
        begun.settimeout(30.0)
        assert begun.recv(1) == b"x"
    lines = said(second.run("script", [ATTEMPT, guest], LIMITS)).splitlines()
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
from {module} import {kind}
from tandem.reward.sandbox.launcher import layout_for
from tandem.reward.sandbox.sandbox import Limits
made = {kind}(layout_for())
sandbox = made.open(seccomp=False)
sandbox.await_ready(60.0)
sandbox.start("script", ["", {program!r}], Limits(cpu_seconds=600.0, wall_seconds=600.0))
print("started", flush=True)
sandbox.outcome()
"""


def test_sandboxes_end_when_the_service_is_killed(launcher: Launcher) -> None:
    program = "import os, time\nos.fork()\nos.fork()\nif os.getpid() != 2: os.setsid()\nwhile True: time.sleep(1)"
    kind = type(launcher)
    code = SERVICE.format(root=str(ROOT), module=kind.__module__, kind=kind.__name__, program=program)
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
    settles(lambda: all(has_ended(one.pid) for one in family), "some of it survived")


# ---- the filter in a simulated kernel ----


def verdict(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """Interprets the filter's BPF instructions."""
    instructions = [struct.unpack_from("=HBBI", program, place) for place in range(0, len(program), 8)]
    data = struct.pack("=IIQQ", number, architecture, 0, argument)
    place, value = 0, 0
    while True:
        code, jump_true, jump_false, operand = instructions[place]
        place += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("=I", data, operand)
            case 0x15 | 0x25 | 0x45:
                true = {0x15: value == operand, 0x25: value > operand, 0x45: bool(value & operand)}[code]
                place += jump_true if true else jump_false
            case 0x06:
                return operand
            case _:
                raise AssertionError(f"instruction {code:#x}")


ALLOW, REFUSE, UNKNOWN, KILL = 0x7FFF0000, 0x50001, 0x50026, 0x80000000
MACHINES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
MINE = 4242


@pytest.mark.parametrize("machine", MACHINES)
def test_filter_verdicts_on_every_architecture(machine: str) -> None:
    architecture, column = MACHINES[machine]
    rules = b"".join(struct.pack("=HBBI", *one) for one in seccomp._rules(machine))
    rules = rules.replace(struct.pack("=I", seccomp._ITSELF), struct.pack("=I", MINE))

    def of(pair: tuple[int, int], argument: int = 0) -> int:
        return verdict(rules, architecture, pair[column], argument)

    for name in seccomp.REFUSED:
        number = seccomp.REFUSED[name][column]
        assert number is None or verdict(rules, architecture, number, 7) == REFUSE, name
    read, write, openat, mmap, futex, exit_group = (0, 63), (1, 64), (257, 56), (9, 222), (202, 98), (231, 94)
    assert {of(pair) for pair in (read, write, openat, mmap, futex, exit_group)} == {ALLOW}
    socketpair, prlimit, clone, clone3 = (53, 199), (302, 261), (56, 220), (435, 435)
    kill, tgkill = (62, 129), (234, 131)
    assert of(socketpair, 1) == ALLOW and of(socketpair, 2) == of(socketpair, 40) == REFUSE
    assert of(prlimit, 0) == ALLOW and of(prlimit, 1) == REFUSE
    thread, fork, new_user = 0x003D0F00, 0x01200011, 0x10000000
    assert of(clone, thread) == ALLOW and of(clone, thread | new_user) == REFUSE
    assert of(clone, fork) == of(clone, fork | new_user) == REFUSE
    assert of(clone3) == UNKNOWN and verdict(rules, architecture, 9999) == UNKNOWN
    assert of(kill, MINE) == of(kill, 0) == of(tgkill, MINE) == ALLOW
    assert {of(kill, 1), of(kill, 0xFFFFFFFF), of(tgkill, 1)} == {REFUSE}
    assert verdict(rules, 0x40000003, 20) == KILL, "a call of another word size"
    if machine == "x86_64":
        assert verdict(rules, architecture, 0x40000000) == UNKNOWN
        assert verdict(rules, architecture, 57) == verdict(rules, architecture, 58) == REFUSE


def test_the_page_lists_exactly_the_refused_calls() -> None:
    text = (ROOT / "docs" / "sandbox.md").read_text().partition("## Refused system calls")[2]
    named = set(re.findall(r"`(\w+)`", text.partition("`clone3`")[0]))
    with_conditions = {"socketpair", "prlimit64", "kill", "tgkill", "tkill", "fork", "vfork", "clone"}
    assert named == {*seccomp.REFUSED, *with_conditions}
    assert {"socket", "ptrace", "execve", "unshare", "mount", "memfd_create", "bpf"} <= set(seccomp.REFUSED)


# ---- the filter in the real kernel ----


def test_every_refused_call_is_refused(launcher: Launcher) -> None:
    if not seccomp.available():
        pytest.skip("no filter of system calls for this machine")
    column = seccomp._ARCHITECTURES[os.uname().machine][1]
    refused = {name: pair[column] for name, pair in seccomp.REFUSED.items() if pair[column] is not None}
    not_implemented = {"a call of x32": 0x40000027, "a call of the future": 9999, "clone3": 435}
    program = f"""
import ctypes, json
libc = ctypes.CDLL(None, use_errno=True)
found = {{}}
for name, number in { ({**refused, **not_implemented})!r}.items():
    ctypes.set_errno(0)
    found[name] = [libc.syscall(ctypes.c_long(number), 0, 0, 0, 0, 0, 0), ctypes.get_errno()]
print(json.dumps(found))
"""
    results = json.loads(isolation._said(launcher, program, seccomp=True))
    unknown = {name: results.pop(name) for name in not_implemented}
    assert {name: result for name, result in results.items() if result != [-1, 1]} == {}
    assert set(map(tuple, unknown.values())) == {(-1, 38)}
    assert len(results) >= 75


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="calls of another word size, as an instruction of x86")
def test_calls_of_another_word_size_kill_the_program(launcher: Launcher) -> None:
    program = """
import ctypes, mmap
code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
code.write(bytes.fromhex("b814000000cd80c3"))  # getpid by int 0x80
address = ctypes.addressof(ctypes.c_char.from_buffer(code))
print(ctypes.CFUNCTYPE(ctypes.c_int)(address)())
"""
    with closing(launcher.open(seccomp=True)) as sandbox:
        sandbox.await_ready(60.0)
        outcome = sandbox.run("script", ["", program], LIMITS)
        assert outcome.exit_code == -signal.SIGSYS and not outcome.stdout
        assert alive(sandbox)
