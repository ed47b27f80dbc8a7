"""Compares what `tandem plan` predicts with real runs, and writes JSON.

    python benchmarks/plan.py [--batches 30] [--rounds 3] [--output benchmarks/records/plan.json]

In each round, a run is measured (`calibration`), then two other settings run, then the calibration again, and so on;
those without an S in their name have S = 1. Sampler and trainer have one thread each, so that neither can use the
other's core. `predicted` is the mean of the predictions from the calibration runs before and after, because the
machine's speed changes over minutes. `own_rates` simulates a setting with the rates of its own run: that error is the
simulation's alone. Errors are medians over the rounds. The exit code is 1 if a prediction is off by more than 15 %.
`--two-samplers` has no bound: together with the trainer they want three cores, and `tandem plan` assumes that every
service has processors of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tandem.services.planning.calibration import Measured, measure  # noqa: E402
from tandem.services.planning.proposals import predict  # noqa: E402

SETTINGS = {
    "calibration (S=0)": ("run.staleness_budget=0",),
    "S=1": (),
    "S=2": ("run.staleness_budget=2",),
    "half the answers": ("rollout.samples_per_prompt=4",),
    "shorter answers": ("rollout.max_response_tokens=48",),
}
TWO_SAMPLERS = {"two samplers": ("rollout.num_replicas=2", "rollout.max_groups_in_flight=2")}
MOST_ERROR = 0.15
GROUPS, SAMPLES, LONGEST_ANSWER, PROMPT_TOKENS = 4, 8, 240, 16
RUN_DEADLINE_SECONDS = 600.0

Figures = dict[str, float]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--two-samplers", action="store_true", help="Also run two samplers, without a bound.")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "plan.json")
    arguments = parser.parse_args()
    settings = {**SETTINGS, **(TWO_SAMPLERS if arguments.two_samplers else {})}
    rounds: list[dict[str, Figures]] = []
    with tempfile.TemporaryDirectory(prefix="tandem-plan-") as scratch:
        folder = Path(scratch)
        _prepare(folder)
        for number in range(arguments.rounds):
            rounds.append(_round(folder, settings, arguments.batches))
            rows = [_row(name, rounds) for name in settings]
            record = {
                "command": "python benchmarks/plan.py " + " ".join(sys.argv[1:]),
                "cores": os.cpu_count(),
                "load_average": os.getloadavg()[1],
                "rounds": number + 1,
                "settings": rows,
            }
            arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    missed = [row["setting"] for row in rows if row["setting"] in SETTINGS and abs(row["error"]) > MOST_ERROR]
    print("\n".join([f"written to {arguments.output}", *(f"NOT MET: {name}" for name in missed)]))
    return 1 if missed else 0


def _round(folder: Path, settings: dict[str, tuple[str, ...]], batches: int) -> dict[str, Figures]:
    first, *others = settings
    before = _measured(folder, settings[first], batches)
    found = {first: _figures(before, [before])}
    for start in range(0, len(others), 2):
        pair = others[start : start + 2]
        measured = [_measured(folder, settings[name], batches) for name in pair]
        after = _measured(folder, settings[first], batches)
        found |= {name: _figures(own, [before, after]) for name, own in zip(pair, measured, strict=True)}
        before = after
    for name, figures in found.items():
        print(f"{name:17} " + "  ".join(f"{key} {value:6.2f}" for key, value in figures.items()), flush=True)
    return found


def _measured(folder: Path, overrides: Sequence[str], batches: int) -> Measured:
    _run(folder, [f"run.total_batches={batches}", *overrides])
    return measure(folder / "run")


def _figures(own: Measured, calibrations: Sequence[Measured]) -> Figures:
    return {
        "measured": own.steps_per_minute,
        "predicted": statistics.mean(predict(one, own.recipe).steps_per_minute for one in calibrations),
        "own_rates": predict(own, own.recipe).steps_per_minute,
    }


def _row(name: str, rounds: list[dict[str, Figures]]) -> dict[str, object]:
    figures = {key: statistics.median(one[name][key] for one in rounds) for key in rounds[0][name]}
    errors = {
        key: statistics.median(one[name][key] / one[name]["measured"] - 1.0 for one in rounds)
        for key in rounds[0][name]
    }
    return {
        "setting": name,
        **{f"{key}_steps_per_minute": round(value, 3) for key, value in figures.items()},
        "error": round(errors["predicted"], 4),
        "error_with_own_rates": round(errors["own_rates"], 4),
        "measured_in_rounds": [round(one[name]["measured"], 3) for one in rounds],
        "predicted_in_rounds": [round(one[name]["predicted"], 3) for one in rounds],
    }


def _run(folder: Path, overrides: list[str]) -> None:
    shutil.rmtree(folder / "run", ignore_errors=True)
    command = [sys.executable, "-m", "tandem.services.cli", "run", str(folder / "recipe.toml"), *overrides]
    done = subprocess.run(command, cwd=ROOT, timeout=RUN_DEADLINE_SECONDS, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def _prepare(folder: Path) -> None:
    """Writes model, data and recipe. Each row limits its own answers to a lognormal length."""
    script = (
        "from tandem.services.data.tiny_model import *; import sys; "
        "build_tiny_model(sys.argv[1], hidden=64, ends=False, chat_template=PLAIN_TEMPLATE)"
    )
    command = [sys.executable, "-c", script, str(folder / "model")]
    subprocess.run(command, cwd=ROOT, check=True, timeout=120, capture_output=True)
    dice = random.Random(0)
    rows = [
        {
            "data_source": "tandem/plan",
            "prompt": [{"role": "user", "content": f"{index:08d}".ljust(PROMPT_TOKENS, "x")}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "x"},
            "extra_info": {"max_response_tokens": min(LONGEST_ANSWER, max(4, round(dice.lognormvariate(4.0, 0.6))))},
        }
        for index in range(2000)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "recipe.toml").write_text(_RECIPE.format(folder=folder))


_RECIPE = f"""
[run]
run_id = "plan"
folder = "{{folder}}/run"
groups_per_batch = {GROUPS}
staleness_budget = 1
[model]
path = "{{folder}}/model"
[data]
train_file = "{{folder}}/train.parquet"
max_prompt_tokens = {PROMPT_TOKENS + 8}
[rollout]
samples_per_prompt = {SAMPLES}
max_response_tokens = {LONGEST_ANSWER}
max_groups_in_flight = {GROUPS}
num_threads = 1
kv_cache_bytes = {64 << 20}
[reward]
scorer = "exact"
[trainer]
num_threads = 1
learning_rate = 1e-5
optimizer_steps_per_batch = 4
"""


if __name__ == "__main__":
    sys.exit(main())
