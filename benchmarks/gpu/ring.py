"""A run of a small model on one GPU that sampler and trainer share: one engine, weights by CUDA IPC, training in
bfloat16. On a CPU: `gloo` and float32. The ledger is verified at the end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.part import Outcome, run_part
from tandem.services.data.arithmetic import write_task
from tandem.services.data.tiny_model import build_tiny_model

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 200.0
BATCHES = 4
KV_CACHE_BYTES = 256 << 20


def main(outcome: Outcome, arguments: list[str]) -> None:
    """`SIZE ENGINE`."""
    engine, on_gpu = arguments[1], torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="tandem-gpu-") as name:
        folder = Path(name)
        write_task(folder / "data", seed=1)
        values = {
            "run": {
                "run_id": "gpu",
                "folder": str(folder / "run"),
                "total_batches": BATCHES,
                "groups_per_batch": 8,
                "staleness_budget": 1,
            },
            "model": {"path": str(build_tiny_model(folder / "model"))},
            "data": {"train_file": str(folder / "data" / "train.parquet"), "max_prompt_tokens": 32},
            "rollout": {
                "engine": engine,
                "samples_per_prompt": 4,
                "max_response_tokens": 16,
                "kv_cache_bytes": KV_CACHE_BYTES,
            },
            "reward": {"scorer": f"{ROOT}/tests/support/scorers.py:digit_share"},
            "trainer": {"learning_rate": 1e-3, "dtype": "bfloat16" if on_gpu else "float32"},
            "weights": {"backend": "ipc" if on_gpu else "gloo"},
        }
        recipe = folder / "recipe.json"
        recipe.write_text(json.dumps(values))
        for command in (("run", str(recipe)), ("ledger", str(folder / "run"))):
            done = _tandem(*command)
            said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
            print("\n".join(said))
            if done.returncode:
                _print_logs(folder / "run" / "logs")
                reason = said[-1] if said else "no output"
                outcome.require(False, f"tandem {command[0]} ended with {done.returncode}: {reason}")
                return
        outcome.lines.append(
            f"`tandem run` trained {BATCHES} batches with the engine `{engine}`, {values['trainer']['dtype']} and "
            f'`weights.backend = "{values["weights"]["backend"]}"`; `tandem ledger` found every group.'
        )


def _tandem(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tandem.services.cli", *arguments]
    environment = {**os.environ, "TANDEM_REDIS_URL": "", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, timeout=SECONDS, capture_output=True, text=True)


def _print_logs(folder: Path) -> None:
    for file in sorted(folder.glob("*.log")):
        print(f"== {file.name}\n{file.read_text()[-3000:]}", flush=True)


if __name__ == "__main__":
    run_part(main)
