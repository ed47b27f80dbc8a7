"""Tools for the tests: some that work, and some that fail in every way."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Literal

from tandem import parallel_tool

STARTED: list[str] = []


def add(a: int, b: int = 1) -> int:
    """Adds two numbers.

    Their sum is exact.

    Args:
        a: The first number,
            of any size.
        b (int): The second one.

    Returns:
        The sum.
    """
    STARTED.append("add")
    return a + b


def fail(how: Literal["raise", "hang", "block", "crash", "exit", "much"]) -> str:
    """Fails."""
    match how:
        case "raise":
            raise ValueError("no such\npage")
        case "hang":
            time.sleep(3600)
        case "block":
            return str(9**9**9)
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            raise SystemExit(3)
    return "😀" * 20_000


def start(file: str) -> str:
    """Leaves a process behind, whose id is in a file."""
    Path(file).write_text(str(subprocess.Popen(["sleep", "3600"]).pid))
    return "started"


@parallel_tool
async def wait(name: str, seconds: float = 0.05) -> str:
    """Waits, and says what began before its end."""
    STARTED.append(name)
    await asyncio.sleep(seconds)
    return " ".join(STARTED)


@parallel_tool
async def ignore_cancellation() -> str:
    """Does not end when it should."""
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(3600)
    return "late"


def no_hint(a) -> int:  # type: ignore[no-untyped-def]
    """Has no type hint."""
    return int(a)


def no_docstring(a: int) -> int:
    return a


def other_parameter(a: int) -> int:
    """Describes another parameter.

    Args:
        b: There is none.
    """
    return a


def any_number(*a: int) -> int:
    """Takes any number of them."""
    return sum(a)
