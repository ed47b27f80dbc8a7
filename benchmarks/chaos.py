"""Runs the demo's model and data under random faults, and writes what was lost (nothing) and how fast all recovered.

    python benchmarks/chaos.py [--faults 200] [--seed 7] [--output benchmarks/records/chaos.json]

The run has ten batches for each fault, at least the demo's 200. `tandem chaos` draws the faults from the seed and
checks the ledger every 5 s. The exit code is 1 if that finds anything wrong, if the model does not reach the accuracy
of the demo, or if a killed service takes longer than `LONGEST_SECONDS`; then the run's folder is kept. 200 faults take
about 35 minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.services.config import load_recipe  # noqa: E402
from tandem.services.data.arithmetic import write_task  # noqa: E402

RECIPE = ROOT / "examples" / "recipes" / "arithmetic.toml"
BATCHES_A_FAULT = 10
LEAST_ACCURACY = 0.95
LONGEST_SECONDS = {"rollout-0": 30.0, "trainer": 30.0, "feed": 8.0, "reward": 8.0}
"""From a kill until the service works again."""
CHECKPOINT_EVERY = 10
MODEL_SECONDS = 900.0
FAULT_SECONDS = 300.0
STOP_SECONDS = 60.0
GROUPS = ("admitted", "committed", "dropped", "dropped:run_ended")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "chaos.json")
    arguments = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="tandem-chaos-", dir="/tmp"))
    record = under_faults(scratch, arguments.faults, arguments.seed)
    record = {"command": " ".join(["python", "benchmarks/chaos.py", *sys.argv[1:]]), "cores": os.cpu_count(), **record}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(f"accuracy {record['final_accuracy']:.1%}; written to {arguments.output}")
    if not record["passed"]:
        print(f"failed; the run is in {scratch}/run", file=sys.stderr)
        return 1
    shutil.rmtree(scratch)
    return 0


def under_faults(folder: Path, faults: int, seed: int) -> dict[str, Any]:
    """Makes the demo's data and model in `folder`, runs them under faults, and returns the record."""
    settings = make_model(folder, seed)
    batches = max(load_recipe(RECIPE).run.total_batches, BATCHES_A_FAULT * faults)
    run, output = folder / "run", folder / "chaos.json"
    changes = {
        **settings,
        "run.folder": run,
        "run.total_batches": batches,
        "trainer.evaluate_every": batches,
        "trainer.checkpoint_every": CHECKPOINT_EVERY,
    }
    options = ["--faults", str(faults), "--seed", str(seed), "--json", str(output)]
    code = tandem("chaos", *options, str(RECIPE), *overrides(changes), seconds=FAULT_SECONDS * faults)
    if not output.exists():
        raise SystemExit("`tandem chaos` ended without a result")
    found = json.loads(output.read_text())
    summary = run / "summary.json"
    accuracy = (json.loads(summary.read_text())["final_accuracy"] if summary.exists() else None) or 0.0
    late = [
        f"{one['target']} took {one['worst_seconds']} s"
        for one in found["recovery"]
        if one["kind"] == "kill" and (one["worst_seconds"] or 0.0) > LONGEST_SECONDS.get(one["target"], math.inf)
    ]
    kept = ("seed", "kinds", "exit_code", "faults_wanted", "faults_made", "checks", "violations", "seconds", "recovery")
    return {
        **{name: found[name] for name in kept},
        "batches": batches,
        "groups": {name: found["groups"].get(name, 0) for name in GROUPS},
        "final_accuracy": accuracy,
        "late": late,
        "passed": code == 0 and accuracy >= LEAST_ACCURACY and not late,
    }


def make_model(folder: Path, seed: int) -> dict[str, Any]:
    """Makes data and a warmed-up model as the demo does; returns the keys of the recipe that name them."""
    write_task(folder / "data", seed)
    python("-m", "tandem.services.commands.demo_model", folder / "base", seed)
    data = folder / "data"
    settings = {
        "run.seed": seed,
        "data.train_file": data / "train.parquet",
        "data.eval_file": data / "eval.parquet",
        "sft.train_file": data / "demonstrations.parquet",
        "sft.output": folder / "model",
    }
    warm_up = {**settings, "model.path": folder / "base", "run.folder": folder / "sft"}
    if tandem("sft", str(RECIPE), *overrides(warm_up), seconds=MODEL_SECONDS):
        raise SystemExit("the warm-up failed")
    return {**settings, "model.path": folder / "model"}


def overrides(values: dict[str, Any]) -> list[str]:
    return [f"{key}={value}" for key, value in values.items()]


def tandem(*arguments: str, seconds: float) -> int:
    process = subprocess.Popen([sys.executable, "-m", "tandem.services.cli", *arguments], cwd=ROOT)
    try:
        return process.wait(seconds)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)  # `tandem chaos` has a disk to unmount
            process.wait(STOP_SECONDS)


def python(*arguments: object) -> None:
    subprocess.run([sys.executable, *map(str, arguments)], cwd=ROOT, timeout=MODEL_SECONDS, check=True)


if __name__ == "__main__":
    sys.exit(main())
