"""Measures how much sampling and training overlap. Runs one recipe at S = 0, 1, 2, 4 and writes JSON.

    python benchmarks/overlap.py [--batches 30] [--repeats 3] [--output benchmarks/records/overlap.json]

Sampler and trainer have one thread each, so that neither can use the other's core. The first workload has answers of
one length, and a KL penalty. The second has lognormal lengths, set by `extra_info.max_response_tokens` of each row.
Its batches are small, so the part of an engine's step that does not depend on the number of sequences counts more,
and long answers that run alone waste time. They train for two epochs, so that the trainer has as much to do.

First, the load is balanced. More rows a batch slow training down more than generation. Their number is changed until,
at the largest budget, the sampler takes 93 to 100 % of the trainer's time for a token. Then all budgets are run in
turn, `--repeats` times, every second time in reverse, so that a machine that gets slower does not favour one of them.
The medians give

    ideal = 1 / max(generation, training)    efficiency = steps per minute / ideal steps per minute

where nothing overlaps at S = 0, so that a batch's wait for scored groups is its generation time, and the rest its
training time, as means. The first batches do not count, nor do the last four, for which everything was sampled before
at the largest budget. So all budgets are compared on batches of the same prompts. If fewer tokens were sampled than
trained, only that share of the steps counts: the others used up what had been sampled before. So a load that drifts
after it was balanced gains nothing.

The exit code is 1 if the speed-up or the efficiency at a budget is below `LEAST_SPEED_UP` or `LEAST_EFFICIENCY`. The
last lines name the requirement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

BUDGETS = (0, 1, 2, 4)
MEAN_ANSWER, PROMPT_TOKENS = 288, 16
LOGNORMAL_SIGMA = 0.6
LONGEST_ANSWER = 960
WARM_UP_BATCHES = 5
BALANCE_BATCHES = 16
LEAST_LOAD, WANTED_LOAD, MOST_LOAD = 0.93, 0.97, 1.0
"""The sampler's time for a token as a share of the trainer's, when the load is balanced."""
LEAST_SPEED_UP = {("fixed", 2): 1.9, ("lognormal", 4): 2.0}
LEAST_EFFICIENCY = {("fixed", 2): 0.97, ("lognormal", 2): 0.97}
RUN_DEADLINE_SECONDS = 900.0


class Workload(NamedTuple):
    """The sizes of a batch."""

    groups: int
    answers: int
    varied: Literal["groups", "answers"]
    """What balances the load."""
    trainer: str
    """A further setting of the trainer."""

    @property
    def size(self) -> int:
        return self.groups if self.varied == "groups" else self.answers

    def with_size(self, size: int) -> Workload:
        return self._replace(**{self.varied: size})


WORKLOADS = {
    "fixed": Workload(5, 12, "answers", "kl.loss.coefficient = 0.001"),
    "lognormal": Workload(10, 4, "groups", "epochs_per_batch = 2"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--batches", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "records" / "overlap.json")
    arguments = parser.parse_args()
    if arguments.batches < (fewest := WARM_UP_BATCHES + max(BUDGETS) + 2):
        parser.error(f"--batches is at least {fewest}")
    with tempfile.TemporaryDirectory(prefix="tandem-overlap-") as scratch:
        folder = Path(scratch)
        _build_model(folder / "model")
        results = {
            shape: _workload(folder, shape, arguments.batches, arguments.repeats) for shape in arguments.workloads
        }
    command = "python benchmarks/overlap.py " + " ".join(sys.argv[1:])
    record: dict[str, Any] = {"cores": os.cpu_count(), "workloads": {}}
    if arguments.output.exists():  # the workloads that were not measured now stay
        record = json.loads(arguments.output.read_text())
    record["workloads"] |= {shape: {"command": command, **found} for shape, found in results.items()}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(record, indent=2) + "\n")
    missed = list(_missed(results))
    print("\n".join([f"written to {arguments.output}", *(f"NOT MET: {line}" for line in missed)]))
    return 1 if missed else 0


def _missed(results: dict[str, dict[str, Any]]) -> Iterator[str]:
    for figure, bounds in (("speed_up", LEAST_SPEED_UP), ("efficiency", LEAST_EFFICIENCY)):
        for (shape, budget), least in bounds.items():
            for row in results.get(shape, {"runs": []})["runs"]:
                if row["staleness_budget"] == budget and row[figure] < least:
                    yield f"{shape}: the {figure} of S = {budget} is {row[figure]:.2f}, not {least}"


def _workload(folder: Path, shape: str, batches: int, repeats: int) -> dict[str, Any]:
    workload = _balance(folder, shape)
    runs: dict[int, list[list[dict[str, Any]]]] = {budget: [] for budget in BUDGETS}
    for repeat in range(repeats):
        for budget in BUDGETS[:: -1 if repeat % 2 else 1]:
            runs[budget].append(_run(folder, shape, budget, batches, workload))
    phases = [_phases(lines) for lines in runs[0]]
    generation = statistics.median(generation for generation, _ in phases)
    training = statistics.median(training for _, training in phases)
    ideal = 60.0 / max(generation, training)
    synchronous = statistics.median(_figures(lines, 0)["steps_per_minute"] for lines in runs[0])
    rows: list[dict[str, Any]] = []
    for budget in BUDGETS:
        figures = [_figures(lines, budget) for lines in runs[budget]]
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
        **workload._asdict(),
        "generation_seconds": generation,
        "training_seconds": training,
        "ideal_steps_per_minute": ideal,
        "runs": rows,
    }


def _phases(lines: list[dict[str, Any]]) -> tuple[float, float]:
    """(generation, training) seconds of a batch in a run at S = 0: its wait for scored groups without the publication
    of the version that samples them, and the rest.
    """
    steady = _steady(lines)
    generation = statistics.fmean(
        line["trainer_idle_seconds"] - before["publication_seconds"] for before, line in itertools.pairwise(steady)
    )
    return generation, statistics.fmean(line["seconds_total"] - line["trainer_idle_seconds"] for line in steady)


def _steady(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The batches that count."""
    return lines[WARM_UP_BATCHES : len(lines) - max(BUDGETS)]


def _balance(folder: Path, shape: str) -> Workload:
    """The workload with the size that gives the sampler nearly as much to do as the trainer."""
    workload = WORKLOADS[shape]
    tried: dict[int, float] = {}
    while workload.size not in tried:
        lines = _run(folder, shape, BUDGETS[-1], BALANCE_BATCHES, workload)
        tried[workload.size] = load = _figures(lines, BUDGETS[-1])["sampler_load"]
        print(f"{shape:9} balance: {workload.size} {workload.varied}: load {load:.2f}", flush=True)
        if LEAST_LOAD <= load <= MOST_LOAD:
            break
        most = max(1, workload.size // 4)  # a single measurement may be far off
        change = max(-most, min(most, round((load - WANTED_LOAD) * 3 * workload.size)))
        workload = workload.with_size(max(2, workload.size + (change or (1 if load > WANTED_LOAD else -1))))
    return workload.with_size(min(tried, key=lambda size: abs(tried[size] - WANTED_LOAD)))


def _figures(lines: list[dict[str, Any]], budget: int) -> dict[str, float]:
    """Figures of the batches that count."""
    steady, before = _steady(lines), lines[WARM_UP_BATCHES - 1]
    seconds = sum(line["seconds_total"] for line in steady)
    waited = sum(line["trainer_idle_seconds"] for line in steady)
    busy = steady[-1]["sampler_busy_seconds"] - before["sampler_busy_seconds"]
    idle = steady[-1]["sampler_idle_seconds"] - before["sampler_idle_seconds"]
    sampled = steady[-1]["sampler_tokens"] - before["sampler_tokens"]
    trained = sum(line["num_loss_tokens"] for line in steady)
    # At S = 0 they differ only by what samplers have not reported yet.
    sampled_share = min(1.0, sampled / trained) if budget else 1.0
    return {
        "steps_per_minute": 60.0 * len(steady) * sampled_share / seconds,
        "sampled_share": sampled_share,
        "trainer_idle_fraction": waited / seconds,
        "sampler_idle_fraction": idle / (busy + idle) if busy + idle else 0.0,
        "sampler_load": busy / sampled * trained / (seconds - waited),
        "mean_staleness": statistics.fmean(line["staleness_mean"] for line in steady),
        "max_staleness": max(line["staleness_max"] for line in steady),
        "sampler_tokens_per_second": sampled / seconds,
        "trainer_tokens_per_second": sum(line["num_tokens"] for line in steady) / seconds,
    }


def _run(folder: Path, shape: str, budget: int, batches: int, workload: Workload) -> list[dict[str, Any]]:
    data = folder / f"{shape}.parquet"
    if not data.exists():
        _write_data(data, shape)
    run = folder / "run"
    shutil.rmtree(run, ignore_errors=True)
    recipe = folder / "recipe.toml"
    recipe.write_text(
        _RECIPE.format(folder=folder, run=run, data=data, batches=batches, budget=budget, **workload._asdict())
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
groups_per_batch = {{groups}}
staleness_budget = {{budget}}
[model]
path = "{{folder}}/model"
[data]
train_file = "{{data}}"
max_prompt_tokens = {PROMPT_TOKENS + 8}
[rollout]
samples_per_prompt = {{answers}}
max_response_tokens = {LONGEST_ANSWER}
max_groups_in_flight = {{groups}}
num_threads = 1
[reward]
scorer = "exact"
[trainer]
num_threads = 1
learning_rate = 1e-5
optimizer_steps_per_batch = 2
{{trainer}}
"""


if __name__ == "__main__":
    sys.exit(main())
