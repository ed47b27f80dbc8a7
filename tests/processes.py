"""What tests ask the kernel about processes that others started."""

from __future__ import annotations

import time

import psutil


def has_ended(pid: int) -> bool:
    """Gone, or waiting to be reaped. A killed process is called a zombie before the last of its threads has ended."""
    try:
        process = psutil.Process(pid)
        return bool(process.status() == psutil.STATUS_ZOMBIE) and process.num_threads() <= 1
    except psutil.NoSuchProcess:  # ZombieProcess among them
        return True


def wait_until_gone(pid: int, seconds: float = 10.0) -> None:
    """Fails if the process lives on."""
    deadline = time.monotonic() + seconds
    while not has_ended(pid):
        assert time.monotonic() < deadline, f"process {pid} lives"
        time.sleep(0.02)
