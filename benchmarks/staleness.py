"""What does staleness cost, and what does off-policy correction give back? Whole runs at S = 0, 1, 4, 8, some seeds
each.

    python benchmarks/staleness.py [--problem demo] [--seeds 5] [--cells 4/token_clip 8/none …] [--batches 200]
    [--minutes 60]

Every cell `S/correction` is the same recipe with another `run.staleness_budget` and `trainer.correction`: as many
batches and optimizer steps, from the same warm start of its seed, through the real services on this machine. Accuracy
is over 2,000 sums that neither the warm start nor the training has seen, answered greedily by the last version.
Intervals are 95 %, t-distribution over seeds.

demo       the demo as it stands, examples/recipes/arithmetic.toml, but for the number of questions: nothing in it was
chosen for
           this study
forgotten  made to be hard: the demo's pupil is taught to forget 9 of 10 carries, so that the right answer is a rare one
whose
           probability must rise tenfold, in 70 batches of two steps. A loss that is clipped around the sampler's policy
           (`none`) can raise it by a fifth for every version the sampler gets, and that is what staleness delays. A
           loss that is clipped around the trainer's own latest policy only (`token_tis`) meets the same few versions'
           wrong answers batch after batch and pushes them down each time, long after they were left, so that the
           probability goes anywhere but to the right ones before a sampler shows it; `token_clip` weighs as `token_tis`
           does and stops where a token has moved far enough from the sampler's policy

Trials, in one process with exact staleness, were made on seeds 0 to 3. The study's begin at 10.

The record is written after every run. Started again with the same settings, the study goes on where it stopped, and
`--seeds` and `--cells` add to it. Exit code 1 if the default correction at S = 4 may lose 3 points or more against S =
0, staleness was not reached, or --minutes were over before every run was made.
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
from tandem.services.process import die_with_parent  # noqa: E402
from tandem.trainer.off_policy.presets import PRESETS  # noqa: E402

BUDGETS = (0, 1, 4, 8)

FIRST_SEED = 10
QUESTIONS = 2000
DEMONSTRATED_SHARE = 0.675  # as many demonstrations as the demo has, though twice as many sums are evaluated
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
"""What each changes in the recipe."""
DEADLINE_SECONDS = 900.0
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
    settings = _settings(arguments.problem, arguments.batches)
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
            print(f"{arguments.minutes:g} minutes are over; the same command goes on from here", flush=True)
            break
        start = arguments.folder / arguments.problem / f"seed-{seed}"
        clock.begin(warm_start=not (start / "model").exists())
        _warm_start(start, seed, forgets=arguments.problem == FORGOTTEN)
        clock.warmed()
        run = _run(arguments.folder / "run", start, seed, cell, settings)
        record["runs"].append(run)
        _write(arguments.output, record)
        print(clock.end() + _told(run, settings), flush=True)
    record["verdicts"], passed = verdicts(record, planned)
    _write(arguments.output, record)
    arguments.output.with_suffix(".md").write_text(page(record))
    print("\n" + "\n".join([*table(record), "", *record["verdicts"]]))
    print(f"\nwritten to {arguments.output} and {arguments.output.with_suffix('.md').name}")
    return 0 if passed else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--problem", choices=PROBLEMS, default=DEMO)
    parser.add_argument("--seeds", type=int, default=5, help="so many, from 10 on")
    parser.add_argument("--cells", nargs="+", type=_cell, default=CELLS, metavar="S/CORRECTION")
    parser.add_argument("--batches", type=int, help="in place of the problem's own number")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no run that would end later")
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs" / "staleness", help="warm starts and the run under way"
    )
    parser.add_argument(
        "--output", type=Path, help="benchmarks/records/staleness.json; staleness_forgotten.json for that problem"
    )
    arguments = parser.parse_args()
    if arguments.output is None:
        ending = "" if arguments.problem == DEMO else f"_{arguments.problem}"
        arguments.output = ROOT / "benchmarks" / "records" / f"staleness{ending}.json"
    arguments.folder = arguments.folder.resolve()  # the services run in the tree's root
    return arguments


def _settings(problem: str, batches: int | None) -> dict[str, Any]:
    """What the runs have in common, as the recipe says it."""
    changed = PROBLEMS[problem] | ({"run.total_batches": batches} if batches else {})
    recipe = load_recipe(RECIPE, [f"{key}={value}" for key, value in changed.items()])
    return {
        "problem": problem,
        "batches": recipe.run.total_batches,
        "groups_per_batch": recipe.run.groups_per_batch,
        "samples_per_prompt": recipe.rollout.samples_per_prompt,
        "optimizer_steps_per_batch": recipe.trainer.optimizer_steps_per_batch,
        "learning_rate": recipe.trainer.learning_rate,
        "warmup_batches": recipe.trainer.warmup_batches,
        "schedule": recipe.trainer.schedule,
        "questions": QUESTIONS,
    }


def _cell(text: str) -> Cell:
    budget, _, correction = text.partition("/")
    if not budget.isdecimal() or correction not in PRESETS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write S/correction, e.g. 4/token_clip; there are {', '.join(PRESETS)}"
        )
    return Cell(int(budget), correction)


def _rotated(cells: Sequence[Cell], seed: int) -> tuple[Cell, ...]:
    """Another order for every seed, so that a busy hour of the machine does not fall on one cell alone."""
    turn = seed * 5 % len(cells)
    return (*cells[turn:], *cells[:turn])


# The record


def _open_record(file: Path, settings: dict[str, Any]) -> dict[str, Any]:
    command = shlex.join(["python", "benchmarks/staleness.py", *sys.argv[1:]])
    record: dict[str, Any] = {"commands": [], "cores": os.cpu_count(), "settings": settings, "runs": []}
    if file.exists():
        record = json.loads(file.read_text())
        if record["settings"] != settings:
            raise SystemExit(
                f"{file} is of other settings: {record['settings']}, now {settings}; name another --output"
            )
    record["commands"] = list(dict.fromkeys([*record["commands"], command]))
    return record


def _write(file: Path, record: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=1) + "\n")
    os.replace(temporary, file)


# One run


def _warm_start(folder: Path, seed: int, *, forgets: bool) -> None:
    """The seed's data and the model that all of its cells start from; nothing if they are there."""
    model = folder / "model"
    if model.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    split = {"evaluation_rows": QUESTIONS, "demonstrated_share": DEMONSTRATED_SHARE}
    write_task(folder / "data", seed, **split)
    base, pupil, done = folder / "base", folder / "pupil", folder / "model.part"
    _python("-m", "tandem.services.commands.demo", str(base), str(seed))
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
    """A whole run from the warm start, and its figures."""
    shutil.rmtree(run, ignore_errors=True)
    overrides = {
        **PROBLEMS[settings["problem"]],
        "run.run_id": "staleness",
        "run.folder": run,
        "run.seed": seed,
        "run.total_batches": settings["batches"],
        "run.staleness_budget": cell.budget,
        "run.metrics_to_tensorboard": "false",
        "model.path": start / "model",
        **_data(start / "data"),
        "trainer.correction": cell.correction,
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
        raise SystemExit(f"the last evaluation is of another version, or not of all questions: {last}")
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
    """A Python of this tree, to its end; it dies with the study."""
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TANDEM_REDIS_URL": ""}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        timeout=DEADLINE_SECONDS,
        capture_output=True,
        text=True,
        check=False,
        preexec_fn=die_with_parent,
    )
    if done.returncode:
        raise SystemExit(
            f"{shlex.join(command)} failed with {done.returncode}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )


class _Clock:
    """What is left of the study, from what its runs took so far."""

    def __init__(self, num_runs: int, minutes: float) -> None:
        self._num_runs = num_runs
        self._end = time.monotonic() + 60.0 * minutes
        self._seconds: list[float] = []
        self._began = 0.0
        self._warming = False

    def has_time(self) -> bool:
        """Whether one more run would end in time."""
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
