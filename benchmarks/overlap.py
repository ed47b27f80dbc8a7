"""Measures how much sampling and training overlap. Runs one recipe at S = 0, 1, 2, 4 and writes JSON.

    python benchmarks/overlap.py [--batches 30] [--repeats 3] [--output benchmarks/records/overlap.json]

Sampler and trainer have one thread each, so that neither can use the other's core. First, generation and training time
are balanced. At S = 0 nothing overlaps, so a batch's wait for scored groups is its
generation time and the rest is its training time. The number of answers per prompt is raised until the two times are
equal within 10 %: more sequences slow training down but hardly an engine's step. Then all budgets are run in turn,
`--repeats` times, and the medians give

    ideal = 1 / max(generation, training)    efficiency = steps per minute / ideal steps per minute

The first workload has answers of one length, the second lognormal lengths, set by `extra_info.max_response_tokens` of
each row. The exit code is 1 if S = 2 is less than 1.5 times as fast as S = 0, its efficiency is below 0.8, or the two
times, measured again over all runs at S = 0, differ by more than a quarter. The last lines name the requirement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BUDGETS = (0, 1, 2, 4)
WORKLOADS = ("fixed", "lognormal")
GROUPS, MEAN_ANSWER, PROMPT_TOKENS = 5, 288, 16
LOGNORMAL_SIGMA = 0.6
LONGEST_ANSWER = 960
WARM_UP_BATCHES = 5
TOLERANCE = 0.1
LEAST_SPEED_UP, LEAST_EFFICIENCY = 1.5, 0.8
RUN_DEADLINE_SECONDS = 900.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "overlap.json")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tandem-overlap-") as scratch:
        folder = Path(scratch)
        _build_model(folder / "model")
        results = {
            shape: _workload(folder, shape, arguments.batches, arguments.repeats) for shape in arguments.workloads
        }
    record = {
        "command": "python benchmarks/overlap.py " + " ".join(sys.argv[1:]),
        "cores": os.cpu_count(),
        "workloads": results,
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    missed = list(_missed(results))
    print("\n".join([f"written to {arguments.output}", *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def _missed(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    for shape, found in results.items():
        row = next(row for row in found["runs"] if row["staleness_budget"] == 2)
        if row["speed_up"] < LEAST_SPEED_UP:
            yield f"{shape}: S = 2 is {row['speed_up']:.2f} times S = 0, not {LEAST_SPEED_UP}"
        if row["efficiency"] < LEAST_EFFICIENCY:
            yield f"{shape}: the efficiency of S = 2 is {row['efficiency']:.2f}, not {LEAST_EFFICIENCY}"
        balance = found["generation_seconds"] / found["training_seconds"]
        if abs(math.log(balance)) > math.log(1.25):
            yield (
                f"{shape}: generation took {balance:.2f} times as long as training; "
                "the machine was not the same throughout"
            )


def _workload(folder: Path, shape: str, batches: int, repeats: int) -> dict[str, Any]:
    samples = _balance(folder, shape)
    runs: dict[int, list[list[dict[str, Any]]]] = {budget: [] for budget in BUDGETS}
    for _ in range(repeats):
        for budget in BUDGETS:
            runs[budget].append(_run(folder, shape, budget, batches, samples))
    phases = [_phases(lines) for lines in runs[0]]
    generation = statistics.median(generation for generation, _ in phases)
    training = statistics.median(training for _, training in phases)
    ideal = 60.0 / max(generation, training)
    synchronous = statistics.median(_figures(lines)["steps_per_minute"] for lines in runs[0])
    rows: list[dict[str, Any]] = []
    for budget in BUDGETS:
        figures = [_figures(lines) for lines in runs[budget]]
        measured = {name: statistics.median(one[name] for one in figures) for name in figures[0]}
        measured["efficiency"] = measured["steps_per_minute"] / ideal
        measured["speed_up"] = measured["steps_per_minute"] / synchronous
        every = [one["steps_per_minute"] for one in figures]
        rows.append({"staleness_budget": budget, **measured, "steps_per_minute_of_repeats": every})
        print(
            f"{shape:9} S={budget}  {measured['steps_per_minute']:6.1f} steps/min "
            f" speed-up {measured['speed_up']:.2f}  "
            f"efficiency {measured['efficiency']:.2f}  idle: sampler {measured['sampler_idle_fraction']:.2f} "
            f"trainer {measured['trainer_idle_fraction']:.2f}  mean staleness {measured['mean_staleness']:.2f}",
            flush=True,
        )
    return {
        "answers_per_prompt": samples,
        "generation_seconds": generation,
        "training_seconds": training,
        "ideal_steps_per_minute": ideal,
        "runs": rows,
    }


def _phases(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """(generation, training) seconds of a batch in a run at S = 0: its wait for scored groups without the publication
    of the version that samples them, and the rest.
    """
    steady = lines[WARM_UP_BATCHES:]
    generation = statistics.median(
        line["trainer_idle_seconds"] - before["publication_seconds"] for before, line in itertools.pairwise(steady)
    )
    return generation, statistics.median(line["seconds_total"] - line["trainer_idle_seconds"] for line in steady)


def _balance(folder: Path, shape: str) -> int:
    """The number of answers per prompt with which training takes as long as generation."""
    low, high, samples = 2, 64, 14
    tried: dict[int, float] = {}
    while samples not in tried:
        generation, training = _phases(_run(folder, shape, 0, 16, samples))
        tried[samples] = generation / training
        print(
            f"{shape:9} balance: {samples} answers a prompt: generation {generation:.3f} s, training {training:.3f} s",
            flush=True,
        )
        if abs(tried[samples] - 1.0) <= TOLERANCE:
            break
        low, high = (samples, high) if generation > training else (low, samples)
        samples = max(low, min(high, round(samples * tried[samples])))
    return min(tried, key=lambda number: abs(math.log(tried[number])))


def _figures(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Figures of the steady state, without the warm-up batches."""
    steady, before = lines[WARM_UP_BATCHES:], lines[WARM_UP_BATCHES - 1]
    seconds = sum(line["seconds_total"] for line in steady)
    busy = steady[-1]["sampler_busy_seconds"] - before["sampler_busy_seconds"]
    idle = steady[-1]["sampler_idle_seconds"] - before["sampler_idle_seconds"]
    return {
        "steps_per_minute": 60.0 * len(steady) / seconds,
        "trainer_idle_fraction": sum(line["trainer_idle_seconds"] for line in steady) / seconds,
        "sampler_idle_fraction": idle / (busy + idle) if busy + idle else 0.0,
        "mean_staleness": statistics.fmean(line["staleness_mean"] for line in steady),
        "max_staleness": max(line["staleness_max"] for line in steady),
        "sampler_tokens_per_second": (steady[-1]["sampler_tokens"] - before["sampler_tokens"]) / seconds,
        "trainer_tokens_per_second": sum(line["num_tokens"] for line in steady) / seconds,
    }


def _run(folder: Path, shape: str, budget: int, batches: int, samples: int) -> list[dict[str, Any]]:
    data = folder / f"{shape}.parquet"
    if not data.exists():
        _write_data(data, shape)
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(
        _RECIPE.format(folder=folder, run=run, data=data, batches=batches, budget=budget, samples=samples)
    )
    command = [sys.executable, "-m", "tandem.services.cli", "run", str(recipe)]
    done = subprocess.run(command, cwd=ROOT, timeout=RUN_DEADLINE_SECONDS, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def _write_data(file: Path, shape: str) -> None:
    dice = random.Random(0)
    mu = 5.48  # median e^5.48 = 240 and sigma 0.6 give a mean of 287 tokens, as long as the fixed answers
    rows = []
    for index in range(2000):
        length = (
            MEAN_ANSWER
            if shape == "fixed"
            else min(LONGEST_ANSWER, max(4, round(dice.lognormvariate(mu, LOGNORMAL_SIGMA))))
        )
        text = f"{index:08d}".ljust(PROMPT_TOKENS, "x")
        rows.append(
            {
                "data_source": "tandem/overlap",
                "prompt": [{"role": "user", "content": text}],
                "ability": "none",
                "reward_model": {"style": "rule", "ground_truth": "x"},
                "extra_info": {"max_response_tokens": length},
            }
        )
    pq.write_table(pa.Table.from_pylist(rows), file)


def _build_model(folder: Path) -> None:
    script = (
        "from tandem.services.data.tiny_model import *; import sys; "
        "build_tiny_model(sys.argv[1], hidden=128, layers=4, ends=False, chat_template=PLAIN_TEMPLATE)"
    )
    subprocess.run([sys.executable, "-c", script, str(folder)], cwd=ROOT, check=True, timeout=120, capture_output=True)


_RECIPE = f"""
[run]
run_id = "overlap"
folder = "{{run}}"
total_batches = {{batches}}
groups_per_batch = {GROUPS}
staleness_budget = {{budget}}
[model]
path = "{{folder}}/model"
[data]
train_file = "{{data}}"
max_prompt_tokens = {PROMPT_TOKENS + 8}
[rollout]
samples_per_prompt = {{samples}}
max_response_tokens = {LONGEST_ANSWER}
max_groups_in_flight = {GROUPS}
num_threads = 1
[reward]
scorer = "exact"
[trainer]
num_threads = 1
learning_rate = 1e-5
optimizer_steps_per_batch = 2
"""


if __name__ == "__main__":
    sys.exit(main())
