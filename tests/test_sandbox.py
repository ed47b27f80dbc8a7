"""The sandbox as the scorer uses it: what programs find inside, what is told of them, which isolation is in force and how it is found."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.errors import ScorerError
from reward.sandbox import isolation
from reward.sandbox.inside import plain, seccomp, wire
from reward.sandbox.isolation import Isolation, find_isolation, open_sandboxes
from reward.sandbox.launcher import BubblewrapLauncher, ZygoteLauncher, bubblewrap_arguments
from reward.sandbox.layout import PACKAGES_FOLDER, layout_for
from reward.sandbox.limits import Limits, Outcome
from reward.sandbox.pool import SandboxPool
from reward.sandbox.sandbox import Sandbox, SandboxError
from services import doctor

ROOT = Path(__file__).resolve().parents[1]
LIMITS = Limits(cpu_seconds=10.0, wall_seconds=60.0)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    """With the best isolation there is here; without any the same must hold, but for the attacks."""
    made = open_sandboxes(allow_unsandboxed=True)
    yield made
    made.close()


@pytest.fixture
def sandbox(pool: SandboxPool) -> Iterator[Sandbox]:
    taken = pool.take()
    yield taken
    taken.close()


def run(sandbox: Sandbox, program: str, stdin: str = "", limits: Limits = LIMITS, prelude: str = "") -> Outcome:
    return sandbox.run("script", [prelude, program], limits, stdin.encode())


def said(outcome: Outcome) -> str:
    assert outcome.failure == "", outcome
    return outcome.stdout.decode()


# ---- what a program finds ----


def test_input_output_and_errors(sandbox: Sandbox) -> None:
    outcome = run(
        sandbox,
        "import sys\nfor line in sys.stdin: print(line.upper(), end='')\nprint('oh', file=sys.stderr)",
        "a\nß é\n",
    )
    assert said(outcome) == "A\nSS É\n" and outcome.stderr == b"oh\n"
    assert 0.0 < outcome.cpu_seconds <= outcome.wall_seconds + 0.1 and outcome.memory_bytes > 1 << 20


@pytest.mark.parametrize(
    ("program", "stdin", "printed"),
    [
        ("print(input(), input())", "1\n2", "1 2\n"),
        ("print(open(0).read())", "x", "x\n"),
        ("import os; print(os.read(0, 10))", "x", "b'x'\n"),
        ("import sys; print(sys.stdin.buffer.read())", "a", "b'a'\n"),
        ("if __name__ == '__main__': print(__file__, __import__('sys').argv)", "", "answer.py ['answer.py']\n"),
        ("import sys\nprint(1)\nsys.exit()\nprint(2)", "", "1\n"),
        ("print(1)\nexit()", "", "1\n"),
        ("from __future__ import annotations\nprint(1)", "", "1\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass A:\n    x: 'int'\nprint(A(1))", "", "A(x=1)\n"),
        ("import atexit\natexit.register(print, 'bye')", "", "bye\n"),
        ("import threading\nthreading.Thread(target=lambda: print('thread')).start()", "", "thread\n"),
        ("import sys, threading\nthreading.stack_size(64 << 20)\nthreading.Thread(target=print).start()", "", "\n"),
        ("def f(n): return n and 1 + f(n - 1)\nprint(f(20_000))", "", "20000\n"),
        ("print(len(str(10 ** 20_000)))", "", "20001\n"),
        ("import asyncio\nasync def f(): print('async')\nasyncio.run(f())", "", "async\n"),
        ("open('note', 'w').write('x'); print(open('/tmp/note').read())", "", "x\n"),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'x'))", "", "1\n"),
        ("import unittest, decimal, sqlite3, zoneinfo, multiprocessing.pool; print(1)", "", "1\n"),
        ("import os; os.write(1, bytes([255, 0, 10]))", "", None),
    ],
)
def test_a_program_finds_an_ordinary_python(sandbox: Sandbox, program: str, stdin: str, printed: str | None) -> None:
    outcome = run(sandbox, program, stdin)
    assert outcome.failure == "", outcome
    assert outcome.stdout == (b"\xff\0\n" if printed is None else printed.encode())


def test_the_prelude_comes_first_and_keeps_the_programs_line_numbers(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "print(ceil(1.5))\n1 / 0", prelude="from math import *\n\n")
    assert outcome.stdout == b"2\n" and b'"answer.py", line 2' in outcome.stderr


def test_large_input(sandbox: Sandbox) -> None:
    text = "x" * 3_000_000
    assert said(run(sandbox, "print(len(input()))", text)) == "3000000\n"


# ---- what is told of it ----


@pytest.mark.parametrize(
    ("program", "failure", "code"),
    [
        ("1 / 0", "error", 1),
        ("print('unfinished", "error", 1),
        ("a\0b", "error", 1),
        ("import sys; sys.exit(3)", "error", 3),
        ("import sys; sys.exit('no')", "error", 1),
        ("import os; os._exit(4)", "error", 4),
        ("import os; os._exit(0)", "", 0),
        ("import os; os.abort()", "error", -signal.SIGABRT),
        ("import ctypes; ctypes.string_at(0)", "error", -signal.SIGSEGV),
        ("(" * 100_000, "error", None),
        ("x = [0] * 10 ** 10", "memory", 1),
        ("raise KeyboardInterrupt", "error", 1),
        ("import threading\nthreading.Thread(target=lambda: 1 / 0).start()", "", 0),
    ],
)
def test_how_a_program_ended(sandbox: Sandbox, program: str, failure: str, code: int | None) -> None:
    outcome = run(sandbox, program)
    assert outcome.failure == failure, outcome
    assert code is None or outcome.exit_code == code


def test_processor_time_counts_and_waiting_does_not(sandbox: Sandbox) -> None:
    """What a busy machine does to a program is not its fault: its own time is limited, and waiting apart."""
    limits = Limits(cpu_seconds=0.3, wall_seconds=60.0)
    assert said(run(sandbox, "import time\ntime.sleep(1)\nprint(1)", limits=limits)) == "1\n"
    outcome = run(sandbox, "while True: pass", limits=limits)
    assert outcome.stopped == "time" and 0.2 < outcome.cpu_seconds < 2.0


def test_the_end_of_what_is_said_on_the_standard_error_is_kept(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "import sys\nfor n in range(10_000): print(n, file=sys.stderr)")
    assert outcome.stderr.endswith(b"9999\n") and len(outcome.stderr) <= 4096


def test_a_run_can_be_stopped(sandbox: Sandbox) -> None:
    sandbox.start("script", ["", "print(1, flush=True)\nwhile True: pass"], LIMITS)
    time.sleep(0.3)
    sandbox.stop()
    outcome = sandbox.outcome()
    assert outcome.stopped == "asked" and outcome.failure == "" and outcome.stdout == b"1\n"
    sandbox.stop()  # too late, and no harm
    assert said(run(sandbox, "print(2)")) == "2\n"


def test_a_working_folder_that_is_not_empty_is_told(sandbox: Sandbox) -> None:
    run(sandbox, "import os\nopen('x', 'w').close()\nos.remove('x')")
    assert sandbox.clean
    run(sandbox, "open('x', 'w').close()")
    assert not sandbox.clean


def test_a_folder_made_unreadable_is_told(sandbox: Sandbox) -> None:
    assert run(sandbox, "import os\nos.mkdir('a')\nos.chmod('a', 0)\nos.chmod('.', 0)").failure == ""
    assert not sandbox.clean


def test_limits_that_cannot_be_set_are_no_answers_fault(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="did not begin"):
        run(sandbox, "print(1)", limits=Limits(file_bytes="much"))  # type: ignore[arg-type]


# ---- the pool ----


def test_no_sandbox_is_given_twice_and_spares_are_ready(pool: SandboxPool) -> None:
    first, second = pool.take(), pool.take()
    try:
        run(first, "open('mine', 'w').close()")
        assert said(run(second, "import os; print(os.listdir('.'))")) == "[]\n"
    finally:
        first.close()
        second.close()
    assert len(pool._spare) == 2


@pytest.fixture
def own_pool() -> Iterator[SandboxPool]:
    made = open_sandboxes(allow_unsandboxed=True)
    yield made
    made.close()


def test_a_pool_outlives_what_makes_its_sandboxes(own_pool: SandboxPool) -> None:
    launcher = own_pool._launcher
    if not isinstance(launcher, ZygoteLauncher):
        pytest.skip("elsewhere every sandbox has a process of its own")
    own_pool.take().close()
    launcher._process.kill()
    launcher._process.wait(timeout=30)
    deadline = time.monotonic() + 30.0
    taken = own_pool.take()
    while taken.fileno() >= 0 and time.monotonic() < deadline:
        try:
            assert said(run(taken, "print(1)")) == "1\n"
            break
        except SandboxError:  # it was alive a moment longer than its maker
            taken.close()
            taken = own_pool.take()
    taken.close()
    assert own_pool._launcher is not launcher


def test_a_closed_pool_gives_nothing_and_leaves_nothing(own_pool: SandboxPool) -> None:
    taken = own_pool.take()
    family = [one for one in psutil.Process().children(recursive=True) if one.name().startswith("python")]
    taken.close()
    own_pool.close()
    own_pool.close()
    with pytest.raises(SandboxError, match="closed"):
        own_pool.take()
    mine = {one.pid for one in psutil.Process().children(recursive=True)}
    launcher = own_pool._launcher
    if isinstance(launcher, ZygoteLauncher):
        assert family and launcher._process.pid not in mine


# ---- which isolation is in force ----

REPORT = """
import sys
sys.path.insert(0, {root!r})
from protos.errors import ScorerError
from reward.sandbox.isolation import find_isolation, open_sandboxes
from reward.sandbox.limits import Limits
print(find_isolation().name)
try:
    open_sandboxes().close()
    print("opened")
except ScorerError as error:
    print("refused:", error)
pool = open_sandboxes(allow_unsandboxed=True)
sandbox = pool.take()
print(sandbox.run("script", ["", {program!r}], Limits()).stdout.decode().strip())
sandbox.close()
pool.close()
"""


WRITABLE = """
import os
folder = os.path.dirname(os.__file__)
print(os.getpid(), os.getuid(), [path for path in ("/", "/usr/lib", "/dev", folder, os.__file__) if os.access(path, os.W_OK)])
"""


def reported(program: str, *prefix: str) -> list[str]:
    """What a process says that finds its isolation behind the prefix, a command that takes something away first."""
    if shutil.which(prefix[0]) is None:
        pytest.skip(f"there is no {prefix[0]} here")
    command = [*prefix, sys.executable, "-c", REPORT.format(root=str(ROOT), program=program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    if "unshare failed" in done.stderr:
        pytest.skip(f"no user namespaces here: {done.stderr.strip()}")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_an_ordinary_user_has_the_same_isolation() -> None:
    """A user namespace in which the service is user 1000 and no other user exists."""
    name, opened, writable = reported(WRITABLE, "unshare", "--user", "--map-user=1000", "--map-group=1000")
    assert name in ("namespaces", "bubblewrap") and opened == "opened"
    assert writable == "2 65534 []", "the files of the service's own user, too, are read-only"


def test_without_user_namespaces_it_refuses_unless_told_otherwise() -> None:
    """A user namespace in which no further ones may be made, as in a container that forbids them."""
    script = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    name, refused, process = reported(
        "import os; print(os.getpid())", "unshare", "--user", "--map-root-user", "sh", "-c", script, "sh"
    )
    assert name == "none" and int(process) > 2
    assert refused.startswith("refused: this machine has no isolation") and "allow_unsandboxed" in refused
    assert "unshare: No space left on device" in refused, "it says what was tried"


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_found", None)


@pytest.mark.usefixtures("unknown")
def test_isolation_that_does_not_hold_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pretended(isolation.BareLauncher):
        name = "namespaces"

    monkeypatch.setattr(isolation, "_KINDS", (Pretended,))
    found = find_isolation()
    assert found.name == "none"
    (fault,) = found.faults
    for broken in ("tcp", "read_files", "other processes"):
        assert broken in fault
    with pytest.raises(ScorerError, match="does not hold"):
        open_sandboxes()
    with pytest.raises(ScorerError, match="does not hold"):
        open_sandboxes()  # the answer is kept, and so is its reason


@pytest.mark.usefixtures("unknown")
def test_no_filter_is_told_and_runs_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "_filters", lambda launcher: False)
    made = open_sandboxes(allow_unsandboxed=True)
    try:
        assert not made.seccomp and not find_isolation().seccomp
        taken = made.take()
        assert said(run(taken, "import socket; socket.socket(); print(1)")) == "1\n"
        taken.close()
    finally:
        made.close()


@pytest.mark.parametrize(
    ("found", "verdict", "told"),
    [
        (Isolation("bubblewrap", True), "ok", "bubblewrap, with seccomp"),
        (
            Isolation("namespaces", False, ("bubblewrap: there is no bwrap on PATH",)),
            "note",
            "namespaces, without seccomp",
        ),
        (
            Isolation("none", True, ("namespaces: unshare: Operation not permitted",)),
            "note",
            "unshare: Operation not permitted",
        ),
    ],
)
def test_doctor_says_which(monkeypatch: pytest.MonkeyPatch, found: Isolation, verdict: str, told: str) -> None:
    monkeypatch.setattr(isolation, "find_isolation", lambda: found)
    finding = doctor.check_sandbox()
    assert finding.verdict == verdict and told in finding.detail
    assert bool(finding.remedy) == (found.name == "none")


# ---- the root of a sandbox ----


def test_packages_are_shown_by_name_alone() -> None:
    layout = layout_for(("numpy",))
    shown = [target for _, target in layout.binds if target.startswith(PACKAGES_FOLDER)]
    assert f"{PACKAGES_FOLDER}/numpy" in shown and layout.path[-1] == PACKAGES_FOLDER
    assert not any(target.endswith("site-packages") for _, target in layout.binds)
    assert any(hidden.endswith("site-packages") for hidden in layout.hidden)
    with pytest.raises(ScorerError, match="no_such_package is not installed"):
        layout_for(("no_such_package",))
    with pytest.raises(ScorerError, match="is not installed"):
        layout_for(("../reward",))


def test_bubblewrap_is_told_all_of_it() -> None:
    layout = layout_for()
    arguments = bubblewrap_arguments(layout, 1 << 20)
    for wanted in (
        "--unshare-user",
        "--unshare-pid",
        "--unshare-net",
        "--unshare-ipc",
        "--unshare-uts",
        "--as-pid-1",
        "--new-session",
    ):
        assert wanted in arguments
    pairs = list(itertools.pairwise(arguments))
    assert ("--remount-ro", "/") in pairs and ("--tmpfs", "/tmp") in pairs and ("--size", str(1 << 20)) in pairs
    assert "--bind" not in arguments and "--proc" not in arguments and "--share-net" not in arguments
    if shutil.which("bwrap") is None:
        with pytest.raises(SandboxError, match="no bwrap"):
            BubblewrapLauncher(layout, 1 << 20)


def test_what_runs_inside_needs_python_alone() -> None:
    """It is sent into sandboxes as text, and a zygote must load nothing that a program could find in its memory."""
    code = (
        "import sys; before = set(sys.modules); import reward.sandbox.inside.zygote\n"
        "print(*{name.partition('.')[0] for name in sys.modules} - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, check=True
    )
    assert set(done.stdout.split()) <= {*sys.stdlib_module_names, "reward"}


# ---- the filter of system calls, as the kernel would run it ----


def verdict(program: bytes, architecture: int, number: int, argument: int = 0) -> int:
    """Interprets the instructions that the filter is made of."""
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
@pytest.mark.parametrize("processes", [False, True])
def test_the_filter_on_every_architecture(machine: str, processes: bool) -> None:
    architecture, column = MACHINES[machine]
    rules = b"".join(struct.pack("=HBBI", *one) for one in seccomp._rules(machine, processes))
    rules = rules.replace(struct.pack("=I", seccomp._ITSELF), struct.pack("=I", MINE))

    def of(pair: tuple[int, int], argument: int = 0) -> int:
        return verdict(rules, architecture, pair[column], argument)

    for name in seccomp.REFUSED:
        number = seccomp._REFUSED[name][column]
        assert number is None or verdict(rules, architecture, number, 7) == REFUSE, name
    read, write, openat, mmap, futex, exit_group = (0, 63), (1, 64), (257, 56), (9, 222), (202, 98), (231, 94)
    assert {of(pair) for pair in (read, write, openat, mmap, futex, exit_group)} == {ALLOW}
    socketpair, prlimit, clone, clone3, kill, tgkill = (
        (53, 199),
        (302, 261),
        (56, 220),
        (435, 435),
        (62, 129),
        (234, 131),
    )
    assert of(socketpair, 1) == ALLOW and of(socketpair, 2) == of(socketpair, 40) == REFUSE
    assert of(prlimit, 0) == ALLOW and of(prlimit, 1) == REFUSE
    thread, fork, new_user = 0x003D0F00, 0x01200011, 0x10000000
    assert of(clone, thread) == ALLOW and of(clone, thread | new_user) == REFUSE
    assert of(clone, fork) == (ALLOW if processes else REFUSE) and of(clone, fork | new_user) == REFUSE
    assert of(clone3) == UNKNOWN and verdict(rules, architecture, 9999) == UNKNOWN
    assert of(kill, MINE) == of(kill, 0) == of(tgkill, MINE) == ALLOW
    assert {of(kill, 1), of(kill, 0xFFFFFFFF), of(tgkill, 1)} == {ALLOW if processes else REFUSE}
    assert verdict(rules, 0x40000003, 20) == KILL, "a call of another word size"
    if machine == "x86_64":
        assert verdict(rules, architecture, 0x40000000) == UNKNOWN
        assert verdict(rules, architecture, 57) == verdict(rules, architecture, 58) == (ALLOW if processes else REFUSE)


def test_the_document_names_what_is_refused_and_nothing_else() -> None:
    text = (ROOT / "docs" / "sandbox.md").read_text().partition("## Refused system calls")[2]
    named = set(re.findall(r"`(\w+)`", text.partition("`clone3`")[0]))
    with_conditions = {"socketpair", "prlimit64", "kill", "tgkill", "tkill", "fork", "vfork", "clone"}
    assert named == {*seccomp.REFUSED, *with_conditions}
    assert {"socket", "ptrace", "execve", "unshare", "mount", "memfd_create", "bpf"} <= set(seccomp.REFUSED)


# ---- messages and data ----


def test_messages_with_descriptors_and_their_ends() -> None:
    mine, theirs = socket.socketpair()
    with mine, theirs:
        read, write = os.pipe()
        large = bytes(range(256)) * 20_000
        sender = threading.Thread(target=wire.send, args=(mine, {"a": 1}, b"", large), kwargs={"descriptors": [write]})
        sender.start()
        message = wire.receive(theirs)
        sender.join(timeout=30)
        assert message is not None and message.header == {"a": 1} and message.parts == [b"", large]
        os.write(message.descriptors[0], b"x")
        assert os.read(read, 1) == b"x"
        for descriptor in (read, write, *message.descriptors):
            os.close(descriptor)
        wire.send(mine, {}, bytes(1000))
        with pytest.raises(ValueError, match="1000 bytes"):
            wire.receive(theirs, 100)
    a_closed_line, other = socket.socketpair()
    other.close()
    with a_closed_line:
        assert wire.receive(a_closed_line) is None


def test_a_message_cut_short_is_no_message() -> None:
    mine, theirs = socket.socketpair()
    with theirs:
        with mine:
            mine.sendall(b"\0\0\0\5{")
        with pytest.raises(ConnectionResetError):
            wire.receive(theirs)


NUMBERS = st.integers() | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False)
ATOMS = (
    st.none()
    | st.booleans()
    | NUMBERS
    | st.text()
    | st.binary()
    | st.integers(min_value=1 << 5000, max_value=1 << 5001)
)
HASHABLE = st.recursive(ATOMS, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=5)
DATA = st.recursive(
    HASHABLE,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner)
        | st.dictionaries(HASHABLE, inner, max_size=3)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=12,
)


def refuse(value: object) -> dict[str, object]:
    raise TypeError(type(value).__name__)


def over_the_line(value: object) -> object:
    return plain.decode(json.loads(plain.dumps(plain.encode(value, refuse))), refuse)


@given(DATA)
def test_plain_data_comes_over_the_line_as_it_was(value: object) -> None:
    came = over_the_line(value)
    assert came == value and type(came) is type(value) and repr(came).count("(") == repr(value).count("(")


def test_what_is_derived_from_data_comes_as_data() -> None:
    class Sly(int):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = int.__hash__

    came = over_the_line([Sly(3), {Sly(4): Sly(5)}])
    assert came == [3, {4: 5}] and came != [4, {4: 5}]
    with pytest.raises(TypeError, match="object"):
        over_the_line([object()])
    endless: list[object] = []
    endless.append(endless)
    with pytest.raises(RecursionError):
        over_the_line(endless)


@pytest.mark.parametrize(
    "forged",
    [{"tuple": 1}, {"x": []}, {}, {"set": [[]]}, {"int": 5}, {"complex": ["x", 1]}, {"dict": [1]}, {"bytes": 1}],
)
def test_forged_data_is_an_error_and_nothing_else(forged: object) -> None:
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        plain.decode(forged, refuse)
