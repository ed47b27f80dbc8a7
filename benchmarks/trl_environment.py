"""The virtual environment of the TRL that benchmarks/against_trl.py compares with: build/trl."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "trl"
REQUIREMENTS = ROOT / "benchmarks" / "trl_requirements.txt"
CONSTRAINTS = ROOT / "constraints-cpu.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"  # as deploy/setup.sh
DEADLINE_SECONDS = 1800.0


def trl_python() -> Path:
    """The interpreter of the environment, which is made anew unless it has the pinned versions and is built on the one
    that runs this. Raises SystemExit.
    """
    interpreter = f"{sys.base_prefix} {sys.version}".encode()
    wanted = hashlib.sha256(interpreter + REQUIREMENTS.read_bytes() + CONSTRAINTS.read_bytes()).hexdigest()
    stamp, python = FOLDER / "stamp", FOLDER / "bin" / "python"
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(FOLDER, ignore_errors=True)
    print(f"installs TRL into {FOLDER}", flush=True)
    if failed := _run([sys.executable, "-m", "venv", str(FOLDER)]):
        raise SystemExit(failed)
    install = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    install += ["--constraint", str(CONSTRAINTS)]
    torch = [*install, "torch==2.13.0+cpu"]
    if _run(torch) and (failed := _run([*torch, "--extra-index-url", TORCH_INDEX, "--retries", "2"])):
        raise SystemExit(failed)
    if failed := _run([*install, "--requirement", str(REQUIREMENTS)]):
        raise SystemExit(failed)
    stamp.write_text(wanted)
    return python


def _run(command: list[str]) -> str:
    """What a failed command said; "" if it succeeded."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False)
    return f"{' '.join(command)} failed:\n{done.stderr[-2000:]}" if done.returncode else ""
