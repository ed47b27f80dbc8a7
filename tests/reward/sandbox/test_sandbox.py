"""The sandbox as the scorer uses it: the programs' environment, their outcomes, and the pool of started sandboxes."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from tandem.protos import reward_pb2
from tandem.reward.sandbox.isolation import SandboxPool, open_sandboxes
from tandem.reward.sandbox.launcher import ZygoteLauncher
from tandem.reward.sandbox.sandbox import Limits, Outcome, Sandbox, SandboxError
from tandem.services.rpc.client import connect
from tests.support.code_answers import isolated
from tests.support.processes import wait_until_gone
from tests.support.reward_process import running_reward
from tests.support.reward_server import Item, Stub
from tests.support.sandbox_runs import give_up_soon, zygote_of

LIMITS = Limits(cpu_seconds=10.0, wall_seconds=60.0)


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    """A pool with the best isolation available here. Without any, everything but the attack tests still holds."""
    with closing(open_sandboxes(allow_unsandboxed=True)) as made:
        yield made


@pytest.fixture
def sandbox(pool: SandboxPool) -> Iterator[Sandbox]:
    with closing(pool.take()) as taken:
        yield taken


def run(sandbox: Sandbox, program: str, stdin: str = "", limits: Limits = LIMITS, prelude: str = "") -> Outcome:
    return sandbox.run("script", [prelude, program], limits, stdin.encode())


def said(outcome: Outcome) -> str:
    assert outcome.failure == "", outcome
    return outcome.stdout.decode()


# ---- environment ----


def test_input_output_and_errors(sandbox: Sandbox) -> None:
    outcome = run(
        sandbox,
        "import sys\nfor line in sys.stdin: print(line.upper(), end='')\nprint('oh', file=sys.stderr)",
        "a\nß é\n",
    )
    assert said(outcome) == "A\nSS É\n" and outcome.stderr == b"oh\n"


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
        ("print(len(input()))", "x" * 3_000_000, "3000000\n"),
        ("import os; os.write(1, bytes([255, 0, 10]))", "", None),
    ],
)
def test_programs_run_as_in_an_ordinary_python(sandbox: Sandbox, program: str, stdin: str, printed: str | None) -> None:
    outcome = run(sandbox, program, stdin)
    assert outcome.failure == "", outcome
    assert outcome.stdout == (b"\xff\0\n" if printed is None else printed.encode())


@pytest.mark.parametrize(
    "program",
    [
        "import sys\nprint('a')\nsys.stdout.close()",
        "import sys\nprint('a')\nsys.stdout = None",
        "import sys\nprint('a')\ndel sys.stdout",
        "out = open(1, 'w')\nprint('a')\nout.write('b')",
        "import os, sys\nsys.stdout.write('a')\nwrite = os.fdopen(1, 'wb').write\nwrite(b'b')",
        "import io, sys\nsys.stdout = io.StringIO()\nprint('a')\nsys.__stdout__.write('b')",
        "import io, sys\nsys.stdout = io.TextIOWrapper(sys.stdout.buffer)\nprint('a')",
        "out = open(1, 'w')\nout.write('a')\nexit()",
        "out = open(1, 'w')\nout.write('a')\n1 / 0",
        "import io\nclass Odd(io.IOBase):\n    def flush(self): raise ValueError\nodd = Odd()\nprint('a')",
        "class Odd:\n    @property\n    def __class__(self): raise ValueError\nodd = Odd()\nprint('a')",
        "import os\nopen(1, 'w').write('a')\nos._exit(0)",
    ],
)
def test_programs_end_as_in_an_ordinary_python(sandbox: Sandbox, program: str) -> None:
    """Output counts even if the interpreter would flush it only at exit."""
    outcome = run(sandbox, program)
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, timeout=60, check=False)
    assert (outcome.exit_code, outcome.stdout) == (done.returncode, done.stdout)


def test_the_prelude_runs_first_without_shifting_line_numbers(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "print(ceil(1.5))\n1 / 0", prelude="from math import *\n\n")
    assert outcome.stdout == b"2\n" and b'"answer.py", line 2' in outcome.stderr


# ---- outcomes ----


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
def test_outcomes_of_programs(sandbox: Sandbox, program: str, failure: str, code: int | None) -> None:
    outcome = run(sandbox, program)
    assert outcome.failure == failure, outcome
    assert code is None or outcome.exit_code == code


def test_the_time_limit_counts_processor_time_only(sandbox: Sandbox) -> None:
    """A busy machine must not fail a program, so processor time and waiting time are limited separately."""
    limits = Limits(cpu_seconds=0.3, wall_seconds=60.0)
    assert said(run(sandbox, "import time\ntime.sleep(1)\nprint(1)", limits=limits)) == "1\n"
    outcome = run(sandbox, "import time\nwhile True: print(time.process_time())", limits=limits)
    assert outcome.stopped == "time" and 0.2 < float(outcome.stdout.split()[-2]) < 2.0


def test_the_end_of_standard_error_is_kept(sandbox: Sandbox) -> None:
    outcome = run(sandbox, "import sys\nfor n in range(10_000): print(n, file=sys.stderr)")
    assert outcome.stderr.endswith(b"9999\n") and len(outcome.stderr) <= 4096


def test_a_run_can_be_stopped(sandbox: Sandbox) -> None:
    program = "import os\nprint(1, flush=True)\nos.write(3, b'x')\nwhile True: pass"
    begun, theirs = socket.socketpair()
    with begun:
        with theirs:
            sandbox.start("script", ["", program], LIMITS, line=theirs)
        begun.settimeout(30.0)
        assert begun.recv(1) == b"x"
    sandbox.stop()
    outcome = sandbox.outcome()
    assert outcome.stopped == "asked" and outcome.failure == "" and outcome.stdout == b"1\n"
    sandbox.stop()  # has no effect after the end
    assert said(run(sandbox, "print(2)")) == "2\n"


@pytest.mark.parametrize(
    ("program", "clean"),
    [
        ("import os\nopen('x', 'w').close()\nos.remove('x')", True),
        ("open('x', 'w').close()", False),
        ("import os\nos.mkdir('a')\nos.chmod('a', 0)\nos.chmod('.', 0)", False),
    ],
)
def test_a_nonempty_or_unreadable_working_folder_is_reported(sandbox: Sandbox, program: str, clean: bool) -> None:
    assert run(sandbox, program).failure == "" and sandbox.clean == clean


def test_limits_that_cannot_be_set_raise_sandbox_error(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="did not begin"):
        run(sandbox, "print(1)", limits=Limits(file_bytes="much"))  # type: ignore[arg-type]


# ---- the pool ----


def test_each_sandbox_is_handed_out_once_and_spares_are_started(pool: SandboxPool) -> None:
    with closing(pool.take()) as first, closing(pool.take()) as second:
        run(first, "open('mine', 'w').close()")
        assert said(run(second, "import os; print(os.listdir('.'))")) == "[]\n"
    assert len(pool._spare) == 2


def test_a_closed_pool_hands_out_nothing_and_leaves_no_process() -> None:
    before = psutil.Process().children()  # the launcher of another pool may start a sandbox meanwhile
    made = open_sandboxes(allow_unsandboxed=True)
    taken = made.take()
    own = [one for one in psutil.Process().children() if one not in before]
    family = [one.pid for child in own for one in (child, *child.children(recursive=True))]
    taken.close()
    for _ in range(2):
        made.close()
    with pytest.raises(SandboxError, match="closed"):
        made.take()
    assert family
    for pid in family:
        wait_until_gone(pid)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_pool_replaces_a_launcher_that_ended_or_stopped(
    shared_pool: SandboxPool, monkeypatch: pytest.MonkeyPatch, how: signal.Signals
) -> None:
    launcher = shared_pool._launcher
    assert isinstance(launcher, ZygoteLauncher)
    shared_pool.take().close()
    zygote = zygote_of(launcher)
    zygote.send_signal(how)
    if how == signal.SIGKILL:
        wait_until_gone(zygote.pid)
    else:
        give_up_soon(monkeypatch, shared_pool, 1.0)
    deadline, done = time.monotonic() + 30.0, 0
    while done < 4 and time.monotonic() < deadline:  # the first ones were started before
        with closing(shared_pool.take()) as taken:
            try:
                assert said(run(taken, "print(1)")) == "1\n"
                done += 1
            except SandboxError:  # it outlived its launcher by a moment
                assert how == signal.SIGKILL
    assert done == 4 and shared_pool._launcher is not launcher
    wait_until_gone(zygote.pid)


RUBRIC = '[[components]]\nname = "tests"\nscorer = "code"\narguments = {seconds_per_test = 1.0}\n'
TESTS = {"inputs": ["1\n", "5\n"], "outputs": ["2\n", "10\n"]}
FORK_BOMB = """
import os
while True:
    try: os.fork()
    except OSError: pass
"""
NEIGHBOURS = {
    "passed": "print(2 * int(input()))",
    "wrong": "print(3 * int(input()))",
    "time": FORK_BOMB,
    "output": "while True: print('x' * 100_000)",
    "error": "import sys\nsys.exit(3)",
    "memory": "x = 'x' * (1 << 40)",
}
"""Programs by the counter of the breakdown in which each shows."""
ANSWERS = [*NEIGHBOURS.items(), ("passed", NEIGHBOURS["passed"])]


@isolated
def test_answers_beside_misbehaving_ones_get_their_own_results_in_the_service(tmp_path: Path) -> None:
    with running_reward(tmp_path, "reward.num_workers=2") as address, connect(address) as channel:
        items = [Item(solution=f"```python\n{program}\n```", ground_truth=json.dumps(TESTS)) for _, program in ANSWERS]
        reply = Stub(channel).Score(reward_pb2.ScoreRequest(items=items, rubric=RUBRIC), timeout=40)
    for (counter, _), item in zip(ANSWERS, reply.items, strict=True):
        assert item.WhichOneof("result") == "scored", (counter, item)
        assert item.scored.value == (counter == "passed"), (counter, item)
        counted = {name.rpartition("/")[2] for name, number in item.scored.breakdown.items() if number}
        assert counted & set(NEIGHBOURS) == {counter}, item
