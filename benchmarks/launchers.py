"""Runs the demo under each launcher and compares the accuracies. Writes JSON.

    python benchmarks/launchers.py [--seeds 3] [--launchers local ray compose] [--output FILE] [KEY=VALUE ...]

compose needs what deploy/compose/smoke.sh needs; TANDEM_IMAGE names an image, for otherwise each run builds one. The
launchers see the same data and the same first model for each seed. Two runs of one launcher and seed differ, too,
because sampling and training overlap; the spread over the seeds is given with the mean. The exit code is 1 if the means
of two launchers differ by more than twice their joint standard error.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.services.commands.demo_tasks import ARITHMETIC  # noqa: E402
from tandem.services.config import dump_recipe, load_recipe  # noqa: E402

LAUNCHERS = ("local", "ray", "compose")
DEADLINE_SECONDS = 1800.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--launchers", nargs="+", choices=LAUNCHERS, default=LAUNCHERS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "launchers.json")
    arguments, overrides = parser.parse_known_args()
    runs: dict[str, list[dict[str, Any]]] = {launcher: [] for launcher in arguments.launchers}
    for seed, launcher in itertools.product(range(arguments.seeds), arguments.launchers):
        with tempfile.TemporaryDirectory(prefix="tandem-launchers-") as scratch:
            make = _composed if launcher == "compose" else _demo
            runs[launcher].append(make(Path(scratch), seed, overrides, launcher))
        print(f"seed {seed}, {launcher}: {runs[launcher][-1]}", flush=True)
    accuracies = {launcher: [one["final_accuracy"] for one in found] for launcher, found in runs.items()}
    record = {
        "command": "python benchmarks/launchers.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "final_accuracy_mean": {launcher: statistics.fmean(found) for launcher, found in accuracies.items()},
        "standard_error": {launcher: _standard_error(found) for launcher, found in accuracies.items()},
        "runs": runs,
    }
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written to {arguments.output}")
    differ = [line for pair in itertools.combinations(accuracies.items(), 2) if (line := _difference(*pair))]
    print("\n".join(f"NOT MET: {line}" for line in differ))
    return 1 if differ else 0


def _demo(scratch: Path, seed: int, overrides: list[str], launcher: str) -> dict[str, Any]:
    """Runs the demo and returns its figures. `scratch` then has its run in `run`."""
    command = [sys.executable, "-m", "tandem.services.cli", "demo", "--launcher", launcher, "--seed", str(seed)]
    _run([*command, f"run.folder={scratch}/run", *overrides])
    return _figures(scratch / "run")


def _composed(scratch: Path, seed: int, overrides: list[str], _launcher: str) -> dict[str, Any]:
    """Runs the demo's recipe under compose, on data and a model that a demo of one batch made before."""
    _demo(scratch, seed, [*overrides, "run.total_batches=1"], "local")
    workspace = scratch / "workspace"
    workspace.mkdir()
    for name in ("data", "model"):
        (scratch / "run" / name).rename(workspace / name)
    places = ["run.folder=run", "model.path=model", "data.train_file=data/train.parquet"]
    recipe = load_recipe(
        ARITHMETIC.recipe, [*places, "data.eval_file=data/eval.parquet", f"run.seed={seed}", *overrides]
    )
    (workspace / "recipe.json").write_text(dump_recipe(recipe))
    _run([str(ROOT / "benchmarks" / "compose_run.sh"), str(workspace)])
    return _figures(workspace / "run")


def _run(command: list[str]) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RAY_ADDRESS", "TANDEM_REDIS_URL")}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=DEADLINE_SECONDS,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}")


def _figures(run: Path) -> dict[str, Any]:
    summary = json.loads((run / "summary.json").read_text())
    return {name: summary[name] for name in ("initial_accuracy", "final_accuracy", "train_steps", "mean_staleness")}


def _difference(one: tuple[str, list[float]], other: tuple[str, list[float]]) -> str:
    """Says by how much the means of two launchers differ, if that is more than noise; else ""."""
    gap = abs(statistics.fmean(one[1]) - statistics.fmean(other[1]))
    noise = 2.0 * math.hypot(_standard_error(one[1]), _standard_error(other[1]))
    return f"{one[0]} and {other[0]} differ by {gap:.3f}, more than {noise:.3f}" if gap > noise else ""


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0


if __name__ == "__main__":
    sys.exit(main())
