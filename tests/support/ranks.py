"""Trainer ranks as processes, started as torchrun would."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.support.paths import ROOT


def run_ranks(module: str, *arguments: Path | str, folder: Path, seconds: float, num_ranks: int = 2) -> None:
    """Runs `python -m <module> <arguments> <folder>` on every rank; all must succeed before the deadline."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    shared |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", module, *map(str, arguments), str(folder)]
    ranks = [
        subprocess.Popen(command, cwd=ROOT, env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)})
        for rank in range(num_ranks)
    ]
    try:
        deadline = time.monotonic() + seconds
        while (codes := [rank.poll() for rank in ranks]) != [0] * num_ranks:
            assert not any(codes), (
                f"{module}: the ranks ended with {codes}"
            )  # the other ranks would wait for the failed one
            assert time.monotonic() < deadline, f"{module}: the ranks have not ended after {seconds:g} s"
            time.sleep(0.05)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def reports_of_ranks(
    module: str, *arguments: Path | str, folder: Path, seconds: float, num_ranks: int = 2
) -> list[Any]:
    """Runs `run_ranks` and returns each rank's `<folder>/rank<number>.json`."""
    run_ranks(module, *arguments, folder=folder, seconds=seconds, num_ranks=num_ranks)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
