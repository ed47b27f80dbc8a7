"""Queries to the kernel about processes that others started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.support.paths import ROOT
from tests.support.waiting import eventually

MARK = "TANDEM_TEST_MARK"
"""An environment variable that all processes started by a command inherit."""


def run_python(
    *arguments: object, cwd: Path = ROOT, seconds: float = 100.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs this interpreter to its end, with these additional environment variables."""
    command, variables = [sys.executable, *map(str, arguments)], os.environ | environment
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=seconds, check=False)


def run_tandem(
    *arguments: object, cwd: Path = ROOT, seconds: float = 100.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs `tandem …` to its end, without this machine's Redis and without a hub."""
    plain = {"TANDEM_REDIS_URL": "", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return run_python("-m", "tandem.services.cli", *arguments, cwd=cwd, seconds=seconds, **plain | environment)


def has_ended(pid: int) -> bool:
    """Whether the process is gone or a zombie. A killed process is a zombie before its last thread has ended."""
    try:
        process = psutil.Process(pid)
        return bool(process.status() == psutil.STATUS_ZOMBIE) and process.num_threads() <= 1
    except psutil.NoSuchProcess:  # includes ZombieProcess
        return True


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    """Fails if the process stays alive."""
    eventually(lambda: has_ended(pid), seconds)


def carriers(mark: str) -> Iterator[str]:
    """The command lines of all living processes that were started with this mark."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes().split(b"\0"):
                yield (process / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended or belongs to another user
            continue
