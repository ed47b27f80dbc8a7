"""Starts the servers that a benchmark measures."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TANDEM = (sys.executable, "-m", "tandem.services.cli")
START_SECONDS = 120.0


@contextmanager
def reward_service(num_workers: int, settings: str, options: Sequence[str] = ()) -> Iterator[tuple[str, int]]:
    """A reward service with these lines in `[reward]` and these options: its address and process id."""
    with tempfile.TemporaryDirectory(prefix="tandem-reward-") as folder:
        file = Path(folder) / "service.toml"
        file.write_text(f"[reward]\nnum_workers = {num_workers}\n{settings}\n")
        command = [*TANDEM, "reward", "serve", str(file), "--port", "0", "--folder", f"{folder}/redis", *options]
        with listening(command) as found:
            yield found


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "TANDEM_REDIS_URL": ""}


@contextmanager
def listening(command: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Starts a command that prints `listens on ADDRESS`: the address and the process id. Ends it on exit."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()) as process:
        timer = threading.Timer(START_SECONDS, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            said: list[str] = []
            for line in process.stdout:
                said.append(line)
                if "listens on " in line:
                    break
            else:
                raise SystemExit(f"{' '.join(command)} did not start:\n{''.join(said)}")
            timer.cancel()
            yield line.split()[-1], process.pid
        finally:
            timer.cancel()
            process.terminate()
            try:
                process.wait(timeout=20.0)
            except subprocess.TimeoutExpired:
                process.kill()
