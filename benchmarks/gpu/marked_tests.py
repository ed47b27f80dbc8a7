"""Runs the tests that are marked `gpu`, or those of them that concern NCCL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.part import Outcome, run_part

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 220.0


def main(outcome: Outcome, arguments: list[str]) -> None:
    """`SIZE gpu|nccl`."""
    chosen = arguments[1]
    files = [str(file) for file in sorted(ROOT.glob("tests/**/test_*.py")) if "pytest.mark.gpu" in file.read_text()]
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-m", "gpu", "-p", "no:cacheprovider", *files]
    command += ["-k", "nccl"] if chosen == "nccl" else []
    done = subprocess.run(command, cwd=ROOT, timeout=SECONDS, capture_output=True, text=True)
    print(done.stdout, done.stderr)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    outcome.require(done.returncode == 0, f"pytest ended with {done.returncode}: {lines[-1] if lines else done.stderr}")
    outcome.lines += [f"- {line}" for line in lines if line.startswith("SKIPPED")]
    outcome.lines += lines[-1:]


if __name__ == "__main__":
    run_part(main)
