"""Shared by the tests of sandboxes: limits, output of programs inside and outside, and a sandbox's processes."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tandem.reward.sandbox.isolation import SandboxPool
from tandem.reward.sandbox.launcher import BubblewrapEachLauncher, BubblewrapLauncher, ZygoteLauncher
from tandem.reward.sandbox.sandbox import Limits, Outcome, Sandbox

LIMITS = Limits(cpu_seconds=10.0, wall_seconds=40.0, memory_bytes=512 << 20, output_bytes=1 << 20)
SECRET = "a key that no program may see"

Launcher = ZygoteLauncher | BubblewrapEachLauncher
Run = Callable[..., Outcome]

ATTEMPT = """
def attempt(act):
    try:
        print(act())
    except OSError as error:
        print(type(error).__name__)
"""
"""Prelude of the programs: prints the result of a function, or the name of its error."""

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
"""Starts a process that leaves its session and writes a heartbeat to `folder` without end."""


def outside(program: str, folder: Path) -> str:
    """The output of the same program without a sandbox."""
    command = [sys.executable, "-I", "-c", ATTEMPT + program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=folder, check=False)
    return done.stdout + done.stderr


def said(outcome: Outcome) -> str:
    assert outcome.exit_code == 0, outcome.stderr.decode()
    return outcome.stdout.decode().strip()


def alive(sandbox: Sandbox) -> bool:
    """Whether the sandbox still runs programs."""
    return said(sandbox.run("script", ["", "print('still here')"], LIMITS)) == "still here"


def zygote_of(launcher: ZygoteLauncher) -> psutil.Process:
    """The process that forks sandboxes: the started one, or the only child of bubblewrap."""
    started = psutil.Process(launcher._process.pid)
    return started.children()[0] if isinstance(launcher, BubblewrapLauncher) else started


def give_up_soon(monkeypatch: pytest.MonkeyPatch, pool: SandboxPool, seconds: float) -> None:
    """The pool gives its present launcher up after these seconds without a sandbox. The next one has the usual time."""
    present, await_ready = pool._launcher, Sandbox.await_ready

    def impatient(sandbox: Sandbox, usual_seconds: float) -> None:
        await_ready(sandbox, seconds if pool._launcher is present else usual_seconds)

    monkeypatch.setattr(Sandbox, "await_ready", impatient)


def inside_of(launcher: Launcher, sandbox: Sandbox) -> set[int]:
    """Process ids, outside the sandboxes, of all processes in a launcher's sandboxes."""
    started = launcher._process if isinstance(launcher, ZygoteLauncher) else sandbox._process
    assert started is not None
    return {process.pid for process in psutil.Process(started.pid).children(recursive=True)}


def settles(condition: Callable[[], bool], what: str) -> None:
    """Fails if the condition does not become true."""
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
