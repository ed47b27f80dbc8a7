"""Measures the seconds from `tandem run` to the first trained batch, until a sampler started alone is ready, and of
`tandem --help`.

    python benchmarks/startup.py [--repeats 3] [--output benchmarks/records/startup.json]

Uses the demo's model (0.66 M parameters) and takes medians over the repeats. Run it on an otherwise idle machine. The
exit code is 1 if a time exceeds the project's limit; the last lines name it. The bytecode of Tandem is written first.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.rollout.engine import find_engine  # noqa: E402
from tandem.services.config import parse_recipe  # noqa: E402
from tandem.services.data.arithmetic import write_task  # noqa: E402
from tandem.services.run.ledger import create_ledger  # noqa: E402
from tandem.services.run.redis_child import RedisChild  # noqa: E402

PACKAGES = ("protos", "reward", "rollout", "services", "tandem", "trainer")
DEADLINE_SECONDS = 120.0
BATCHES = 20
ALLOWED = {
    "run_to_first_batch_seconds": 10.0,
    "weight_stall_seconds_mean": 0.05,
    "sampler_alone_ready_seconds": 10.0,
    "help_seconds": 0.3,
}
HELP_REPEATS = 15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "startup.json")
    arguments = parser.parse_args()
    # Python writes the bytecode at a first start, unless the environment forbids it; then every start compiles.
    subprocess.run([sys.executable, "-m", "compileall", "-qq", *PACKAGES], cwd=ROOT, check=True)
    with tempfile.TemporaryDirectory(prefix="tandem-startup-") as scratch:
        folder = Path(scratch)
        recipe = _prepare(folder)
        runs = [_whole_run(folder, recipe) for _ in range(arguments.repeats)]
        alone = [_sampler_alone(folder) for _ in range(arguments.repeats)]
    record: dict[str, Any] = {
        "command": "python benchmarks/startup.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "run_to_first_batch_seconds": statistics.median(first for first, _ in runs),
        "weight_stall_seconds_mean": statistics.median(stall for _, stall in runs),
        "sampler_alone_ready_seconds": statistics.median(alone),
        "help_seconds": statistics.median(_help() for _ in range(HELP_REPEATS)),
        "model_check_seconds": _model_check(),
        "all": {"run_to_first_batch_seconds": [first for first, _ in runs], "sampler_alone_ready_seconds": alone},
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(json.dumps(record, indent=2))
    missed = [f"{name} is over {most}" for name, most in ALLOWED.items() if record[name] > most]
    print("\n".join(f"NOT MET: {line}" for line in missed))
    return 1 if missed else 0


def _help() -> float:
    started = time.perf_counter()
    subprocess.run(
        [Path(sys.executable).with_name("tandem"), "--help"], check=True, timeout=DEADLINE_SECONDS, capture_output=True
    )
    return time.perf_counter() - started


def _model_check() -> dict[str, float]:
    """Seconds to list the architectures that vLLM supports: from its source, as preflight does, and by importing it."""
    started = time.perf_counter()
    assert find_engine("vllm").known_architectures()
    read = time.perf_counter() - started
    started = time.perf_counter()
    code = "from vllm.model_executor.models import ModelRegistry; assert ModelRegistry.get_supported_archs()"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=DEADLINE_SECONDS, stderr=subprocess.DEVNULL)
    return {"read_from_source": round(read, 3), "imported": round(time.perf_counter() - started, 3)}


def _prepare(folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "-m", "tandem.services.commands.demo_model", str(folder / "model"), "0"],
        cwd=ROOT,
        check=True,
        timeout=DEADLINE_SECONDS,
    )
    write_task(folder / "data", 0)
    recipe = folder / "recipe.json"
    values = {
        "run": {
            "run_id": "startup",
            "folder": str(folder / "run"),
            "total_batches": BATCHES,
            "groups_per_batch": 32,
        },
        "model": {"path": str(folder / "model")},
        "data": {"train_file": str(folder / "data" / "train.parquet"), "max_prompt_tokens": 16},
        "rollout": {"samples_per_prompt": 8, "max_response_tokens": 8, "kv_cache_bytes": 64 << 20},
    }
    recipe.write_text(json.dumps(values))
    return recipe


def _whole_run(folder: Path, recipe: Path) -> tuple[float, float]:
    """(seconds to the first line of metrics.jsonl, mean stall per weight update)."""
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, "-m", "tandem.services.cli", "run", str(recipe)]
    started = time.time()
    subprocess.run(command, cwd=ROOT, check=True, timeout=DEADLINE_SECONDS, stdout=subprocess.DEVNULL)
    first = json.loads((run / "metrics.jsonl").read_text().partition("\n")[0])
    return first["time"] - started, json.loads((run / "summary.json").read_text())["weight_stall_seconds_mean"]


def _sampler_alone(folder: Path) -> float:
    """Seconds from the start of `tandem serve rollout` until it prints that it is ready."""
    run = folder / "alone"
    shutil.rmtree(run, ignore_errors=True)
    values = json.loads((folder / "recipe.json").read_text())
    values["run"] = {**values["run"], "folder": str(run)}
    recipe = parse_recipe(values)
    run.mkdir()
    with RedisChild(run, report=print) as redis:
        from tandem.services.buffer.buffer import Buffer

        create_ledger(Buffer(redis.url, recipe.run.run_id), recipe, False)
        command = [sys.executable, "-m", "tandem.services.cli", "serve", "rollout", str(run / "config.json")]
        environment = {**os.environ, "TANDEM_REDIS_URL": redis.url, "OMP_NUM_THREADS": "1"}
        started = time.monotonic()
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if re.search(r"ready after", line):
                    return time.monotonic() - started
            raise SystemExit(f"the sampler ended with {process.wait()}")
        finally:
            process.terminate()
            process.wait(30)


if __name__ == "__main__":
    sys.exit(main())
