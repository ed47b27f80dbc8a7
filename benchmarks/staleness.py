"""Measures what staleness costs and what off-policy correction recovers, by whole runs at S = 0, 1, 4 and 8.

    python benchmarks/staleness.py [--problem demo] [--seeds 5] [--cells 4/token_clip 8/none …] [--batches 200]
    [--dtype bfloat16] [--minutes 60]

A cell `S/correction` is one value of `run.staleness_budget` and one of `trainer.correction`. All cells of a seed start
from the same model and take the same number of batches and optimizer steps, through the real services on this machine.
Accuracy is measured on 2,000 sums that neither the warm start nor the training has seen, answered greedily by the last
version. Intervals are 95 % t-intervals over seeds.

There are two problems:

demo       examples/recipes/arithmetic.toml as it stands, with more evaluation questions. Nothing in it was chosen for
           this study.
forgotten  A harder version. The initial model is trained to forget 9 of 10 carries, so a correct answer is rare and its
           probability must rise tenfold in 70 batches of two steps. `none` clips around the sampler's policy, so the
           probability rises by at most a fifth for each version that the sampler receives; staleness delays those
           versions. `token_tis` clips around the trainer's latest policy only. It keeps lowering the wrong answers of
           old versions after the policy has left them, and the probability can move to other wrong answers before a
           sampler shows it. `token_clip` weighs tokens as `token_tis` does, and stops where a token has moved far
           enough from the sampler's policy.

Trials in one process with exact staleness used seeds 0 to 3. The study's seeds begin at 10.

The summary is written after every run. The same command continues where it stopped; more `--seeds` and `--cells` add to
the study. Every figure of every run, with its reward by batch, is appended to runs.jsonl in `--folder`. The exit code
is 1 if the default correction may lose 3 points or more at S = 4, if the mean staleness was too low, or if `--minutes`
passed before all runs were made.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.staleness_report import DEFAULT, NAIVE, TRUNCATED, Cell, page, runs_of, table, verdicts  # noqa: E402
from tandem.services.config import load_recipe  # noqa: E402
from tandem.services.data.arithmetic import write_task  # noqa: E402
from tandem.services.process import dying_with_parent  # noqa: E402
from tandem.trainer.off_policy.presets import PRESETS  # noqa: E402

BUDGETS = (0, 1, 4, 8)

FIRST_SEED = 10
QUESTIONS = 2000
DEMONSTRATED_SHARE = 0.675  # keeps the demo's number of demonstrations with twice as many evaluation sums
FORGETFUL_SHARE = 0.9
FORGETTING_STEPS = 300
RECIPE = ROOT / "examples" / "recipes" / "arithmetic.toml"
DEMO, FORGOTTEN = "demo", "forgotten"
PROBLEMS: dict[str, dict[str, Any]] = {
    DEMO: {},
    FORGOTTEN: {
        "run.total_batches": 70,
        "trainer.optimizer_steps_per_batch": 2,
        "trainer.learning_rate": 1.5e-4,
        "trainer.warmup_batches": 5,
    },
}
"""The changes that each problem makes to the recipe."""
DEADLINE_SECONDS = 900.0
SUMMARY = (
    "seed",
    "staleness_budget",
    "correction",
    "accuracy",
    "initial_accuracy",
    "mean_staleness",
    "max_staleness",
    "optimizer_steps",
    "seconds",
    "train_seconds",
    "behavior_proximal_kl",
    "effective_sample_size",
    "clipped_fraction",
)
"""The figures of a run that the summary keeps."""
FIGURES = (
    "behavior_proximal_kl",
    "effective_sample_size",
    "truncated_fraction",
    "rejected_fraction",
    "clipped_fraction",
    "grad_norm",
)


CELLS = tuple(Cell(budget, correction) for budget in BUDGETS for correction in (NAIVE, TRUNCATED, DEFAULT))


def main() -> int:
    arguments = _arguments()
    settings = _settings(arguments.problem, arguments.batches, arguments.dtype)
    record = _open_record(arguments.output, settings)
    cells = tuple(dict.fromkeys(arguments.cells))
    planned = [
        (seed, cell) for seed in range(FIRST_SEED, FIRST_SEED + arguments.seeds) for cell in _rotated(cells, seed)
    ]
    todo = [(seed, cell) for seed, cell in planned if not runs_of(record, cell, seed)]
    print(f"{len(planned)} runs, {len(planned) - len(todo)} of them done", flush=True)
    clock = _Clock(len(todo), arguments.minutes)
    for seed, cell in todo:
        if not clock.has_time():
            print(f"{arguments.minutes:g} minutes have passed; run the same command to continue", flush=True)
            break
        start = arguments.folder / arguments.problem / f"seed-{seed}"
        clock.begin(warm_start=not (start / "model").exists())
        _warm_start(start, seed, forgets=arguments.problem == FORGOTTEN)
        clock.warmed()
        run = _run(arguments.folder / "run", start, seed, cell, settings)
        with (arguments.folder / "runs.jsonl").open("a") as lines:
            lines.write(json.dumps({"problem": arguments.problem, **run}) + "\n")
        record["runs"].append({name: run[name] for name in SUMMARY})
        _write(arguments.output, record)
        print(clock.end() + _told(run, settings), flush=True)
    record["verdicts"], passed = verdicts(record, planned)
    _write(arguments.output, record)
    arguments.output.with_suffix(".md").write_text(page(record), encoding="utf-8")
    print("\n" + "\n".join([*table(record), "", *record["verdicts"]]))
    print(f"\nwritten to {arguments.output} and {arguments.output.with_suffix('.md').name}")
    return 0 if passed else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--problem", choices=PROBLEMS, default=DEMO)
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, counted from 10")
    parser.add_argument("--cells", nargs="+", type=_cell, default=CELLS, metavar="S/CORRECTION")
    parser.add_argument("--batches", type=int, help="batches of each run; the default depends on the problem")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="trainer.dtype of all runs")
    parser.add_argument("--minutes", type=float, default=math.inf, help="start no run that would end after this time")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "staleness", help="warm starts, the current run, runs.jsonl"
    )
    parser.add_argument(
        "--output", type=Path, help="the summary; default benchmarks/records/staleness[_forgotten][_bfloat16].json"
    )
    arguments = parser.parse_args()
    if arguments.output is None:
        ending = "" if arguments.problem == DEMO else f"_{arguments.problem}"
        ending += "" if arguments.dtype == "float32" else f"_{arguments.dtype}"
        arguments.output = ROOT / "benchmarks" / "records" / f"staleness{ending}.json"
    arguments.folder = arguments.folder.resolve()  # the services run in the tree's root
    return arguments


def _settings(problem: str, batches: int | None, dtype: str) -> dict[str, Any]:
    """The settings that all runs of the study share."""
    changed = PROBLEMS[problem] | ({"run.total_batches": batches} if batches else {}) | {"trainer.dtype": dtype}
    recipe = load_recipe(RECIPE, [f"{key}={value}" for key, value in changed.items()])
    return {
        "problem": problem,
        "batches": recipe.run.total_batches,
        "groups_per_batch": recipe.run.groups_per_batch,
        "samples_per_prompt": recipe.rollout.samples_per_prompt,
        "optimizer_steps_per_batch": recipe.trainer.optimizer_steps_per_batch,
        "learning_rate": recipe.trainer.learning_rate,
        "dtype": recipe.trainer.dtype,
        "warmup_batches": recipe.trainer.warmup_batches,
        "schedule": recipe.trainer.schedule,
        "questions": QUESTIONS,
    }


def _cell(text: str) -> Cell:
    budget, _, correction = text.partition("/")
    if not budget.isdecimal() or correction not in PRESETS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected S/correction, e.g. 4/token_clip; corrections: {', '.join(PRESETS)}"
        )
    return Cell(int(budget), correction)


def _rotated(cells: Sequence[Cell], seed: int) -> tuple[Cell, ...]:
    """The cells in a different order for every seed, to spread other load on the machine over the cells."""
    turn = seed * 5 % len(cells)
    return (*cells[turn:], *cells[:turn])


# The record


def _open_record(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    command = shlex.join(["python", "benchmarks/staleness.py", *sys.argv[1:]])
    record: dict[str, Any] = {"commands": [], "cores": os.cpu_count(), "settings": settings, "runs": []}
    if file.exists():
        record = json.loads(file.read_text("utf-8"))
        if record["settings"] != settings:
            raise SystemExit(
                f"{file} was made with other settings ({record['settings']}, now {settings}); choose another --output"
            )
    record["commands"] = list(dict.fromkeys([*record["commands"], command]))
    return record


def _write(file: Path, record: dict[str, Any]) -> None:
    """Writes the summary with one line for each run."""
    file.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps({name: value for name, value in record.items() if name != "runs"}, indent=1, ensure_ascii=False)
    runs = ",\n".join("  " + json.dumps(run) for run in record["runs"])
    temporary = file.with_suffix(".tmp")
    temporary.write_text(f'{head[:-2]},\n "runs": [\n{runs}\n ]\n}}\n', encoding="utf-8")
    os.replace(temporary, file)


# One run


def _warm_start(folder: Path, seed: int, *, forgets: bool) -> None:
    """Makes the seed's data and the model that all of its cells start from, unless they exist."""
    model = folder / "model"
    if model.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    split = {"evaluation_rows": QUESTIONS, "demonstrated_share": DEMONSTRATED_SHARE}
    write_task(folder / "data", seed, **split)
    base, pupil, done = folder / "base", folder / "pupil", folder / "model.part"
    _python("-m", "tandem.services.commands.demo_model", str(base), str(seed))
    _imitate(folder, seed, base, folder / "data", pupil if forgets else done)
    if forgets:
        write_task(folder / "forgetful", seed, sloppy_share=FORGETFUL_SHARE, **split)
        forgetting = (f"sft.max_steps={FORGETTING_STEPS}", "sft.learning_rate=1e-3", "sft.target_accuracy=0")
        _imitate(folder, seed, pupil, folder / "forgetful", done, *forgetting)
    done.rename(model)


def _imitate(folder: Path, seed: int, start: Path, data: Path, output: Path, *overrides: str) -> None:
    paths = {
        "run.folder": folder / "sft",
        "model.path": start,
        **_data(data),
        "sft.train_file": data / "demonstrations.parquet",
        "sft.output": output,
    }
    settings = [f"{key}={value}" for key, value in paths.items()]
    _python("-m", "tandem.services.cli", "sft", str(RECIPE), f"run.seed={seed}", *settings, *overrides)


def _data(folder: Path) -> dict[str, Path]:
    return {"data.train_file": folder / "train.parquet", "data.eval_file": folder / "eval.parquet"}


def _run(run: Path, start: Path, seed: int, cell: Cell, settings: dict[str, Any]) -> dict[str, Any]:
    """Makes one run from the warm start and returns its figures."""
    shutil.rmtree(run, ignore_errors=True)
    overrides = {
        **PROBLEMS[settings["problem"]],
        "run.run_id": "staleness",
        "run.folder": run,
        "run.seed": seed,
        "run.total_batches": settings["batches"],
        "run.staleness_budget": cell.budget,
        "model.path": start / "model",
        **_data(start / "data"),
        "trainer.correction": cell.correction,
        "trainer.dtype": settings["dtype"],
        "trainer.evaluate_every": 0,  # the first version and the last
        "trainer.checkpoint_every": settings["batches"],
    }
    load, began = os.getloadavg()[0], time.monotonic()
    _python("-m", "tandem.services.cli", "run", str(RECIPE), *(f"{key}={value}" for key, value in overrides.items()))
    seconds = time.monotonic() - began
    summary = json.loads((run / "summary.json").read_text())
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = json.loads((run / "evaluations.jsonl").read_text().splitlines()[-1])
    if (last["version"], last["num_scored"]) != (settings["batches"], QUESTIONS):
        raise SystemExit(f"the last evaluation has another version, or lacks questions: {last}")
    return {
        "seed": seed,
        "staleness_budget": cell.budget,
        "correction": cell.correction,
        "accuracy": last["accuracy"],
        "initial_accuracy": summary["initial_accuracy"],
        "mean_staleness": summary["mean_staleness"],
        "max_staleness": summary["observed_max_staleness"],
        "train_steps": summary["train_steps"],
        "optimizer_steps": summary["optimizer_steps"],
        "seconds": round(seconds, 1),
        "train_seconds": round(summary["train_seconds"], 1),
        "trainer_idle_fraction": round(summary["trainer_idle_fraction"], 3),
        "sampler_idle_fraction": round(summary["sampler_idle_fraction"], 3),
        "load_before": round(load, 1),
        "reward_mean": [round(line["reward_mean"], 3) for line in lines],
        **{name: round(statistics.fmean(line.get(name, 0.0) for line in lines), 5) for name in FIGURES},
    }


def _python(*arguments: str) -> None:
    """Runs a Python process of this checkout to its end; it is killed if the study is."""
    command = dying_with_parent([sys.executable, *arguments])
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TANDEM_REDIS_URL": ""}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        timeout=DEADLINE_SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{shlex.join(command)} failed with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )


class _Clock:
    """Estimates the remaining time from the runs made so far."""

    def __init__(self, num_runs: int, minutes: float) -> None:
        self._num_runs = num_runs
        self._end = time.monotonic() + 60.0 * minutes
        self._seconds: list[float] = []
        self._began = 0.0
        self._warming = False

    def has_time(self) -> bool:
        """Whether another run is expected to end in time."""
        return time.monotonic() + (statistics.fmean(self._seconds) if self._seconds else 0.0) <= self._end

    def begin(self, *, warm_start: bool) -> None:
        self._began = time.monotonic()
        self._warming = warm_start

    def warmed(self) -> None:
        if self._warming:
            print(f"warm start: {time.monotonic() - self._began:.0f} s", flush=True)
        self._began = time.monotonic()

    def end(self) -> str:
        self._seconds.append(time.monotonic() - self._began)
        left = (self._num_runs - len(self._seconds)) * statistics.fmean(self._seconds)
        return f"[{len(self._seconds)}/{self._num_runs}] {left / 60:.0f} min left  "


def _told(run: dict[str, Any], settings: dict[str, Any]) -> str:
    wanted = settings["batches"] * settings["optimizer_steps_per_batch"]
    skipped = "" if run["optimizer_steps"] == wanted else f"  {wanted - run['optimizer_steps']} steps skipped"
    return (
        f"seed {run['seed']}  S = {run['staleness_budget']} {run['correction']:12}  "
        f"accuracy {run['initial_accuracy']:.1%} → {run['accuracy']:.1%}  "
        f"mean staleness {run['mean_staleness']:.2f}  {run['seconds']:.0f} s, of "
        f"them {run['train_seconds']:.0f} s training{skipped}"
    )


if __name__ == "__main__":
    sys.exit(main())
