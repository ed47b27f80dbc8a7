"""Programs that use too many processes or threads, or too much memory, output, files or time. Other programs are not
affected.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from tandem.reward.sandbox.sandbox import Limits, Sandbox
from tests.support.sandbox_runs import DISK_BYTES, LIMITS, MANY, Launcher, Run, alive, inside_of, said, settles

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
    born, why = said(run(FORK_BOMB, MANY)).split()
    assert int(born) <= MANY.processes + MANY.threads and why == "BlockingIOError"
    settles(lambda: inside_of(launcher, sandbox) <= before, "children survived")
    if filtered:
        assert said(run(FORK_BOMB)) == "0 PermissionError"
    assert alive(sandbox)


def test_an_endless_fork_bomb_ends_with_its_time_limit(launcher: Launcher, sandbox: Sandbox, run: Run) -> None:
    before = inside_of(launcher, sandbox)
    program = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    many = Limits(cpu_seconds=0.4, wall_seconds=0.8, processes=8, threads=8)
    assert run(program, many).failure == "time"
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
    few = Limits(cpu_seconds=10.0, wall_seconds=40.0, threads=20, memory_bytes=4 << 30)
    assert int(said(run(program, few))) <= 21 and alive(sandbox)


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
    assert outcome.exit_code != 0 and outcome.memory_bytes < 600 << 20
    assert outcome.failure in ("memory", "error"), outcome
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
    ],
)
def test_an_endless_program_is_stopped(sandbox: Sandbox, run: Run, program: str) -> None:
    assert run(program, Limits(cpu_seconds=0.4, wall_seconds=0.8)).failure == "time" and alive(sandbox)


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
