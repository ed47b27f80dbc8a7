"""`tandem demo`: generates data and a model, warms the model up, trains it in a whole run, and shows the results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tandem.protos.errors import ConfigError, RunExistsError, TandemError
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import find_engine, usable_engine
from tandem.services.buffer.buffer import Buffer
from tandem.services.command_line import print_line
from tandem.services.commands.demo_tasks import TASKS, DemoTask, TaskName
from tandem.services.commands.report import write_report
from tandem.services.config import Recipe, load_recipe
from tandem.services.config.recipe import read_values
from tandem.services.launchers.supervisor import LauncherName, run_recipe
from tandem.services.process import dying_with_parent
from tandem.services.run.folder import CONFIG_FILE, LOCK_FILE, RunLock, external_redis_url, redis_required, write_text
from tandem.services.run.placement import CPU_ENVIRONMENT
from tandem.services.run.preflight import REDIS_SECONDS
from tandem.trainer.checkpoints.durable import disk_full_error

MODEL_MAKER = "tandem.services.commands.demo_model"
WARM_UP_DEADLINE_SECONDS = 900.0
BASE_MODEL = "base"  # in the run folder, beside the data
USER_ERROR = 2


def main(
    seed: int, overrides: list[str], task_name: TaskName = "arithmetic", launcher_name: LauncherName = "local"
) -> int:
    """Runs the demo in `run.folder`. Returns the run's exit code. After a UserError an earlier demo is in place."""
    task = TASKS[task_name]
    if not task.recipe.is_file():
        raise ConfigError(
            f"{task.recipe}: no such file; the demo runs from a clone of the repository, installed with `make setup`"
        )
    console = Console()
    started = time.monotonic()
    settings = demo_settings(task, seed, overrides)
    recipe = load_recipe(task.recipe, settings)
    folder = recipe.folder
    _check_redis(recipe)
    _set_aside(folder, console)
    with RunLock(folder) as lock:
        print_line(console, f"Tandem demo: {task.summary}. Everything goes to {folder}/")
        if recipe.rollout.engine != RolloutConfig().engine:
            lacking = find_engine(RolloutConfig().engine)
            why = "" if lacking.installed else f": {lacking.library} is not installed here ({lacking.install})"
            print_line(console, f"· sampling with {recipe.rollout.engine}{why}")
        _make_data(task, recipe, seed)
        print_line(console, f"· data is made; a random model imitates {task.teacher} …")
        if code := _make_and_warm_up(task, recipe, settings, seed):
            return code
        taken = f"{time.monotonic() - started:.0f} s"
        print_line(console, f"· warmed up ({taken}); now sampler, scorer and trainer run at once:")
        code = run_recipe(recipe, False, console=console, lock=lock, launcher_name=launcher_name)
    if code == 0:
        _show(folder, time.monotonic() - started, console)
    return code


def demo_settings(task: DemoTask, seed: int, overrides: list[str]) -> list[str]:
    """Overrides of the demo's recipe: data and models are in the run folder. The user's overrides come last."""
    given = [f"run.seed={seed}", *overrides]
    recipe = load_recipe(task.recipe, given)
    folder = recipe.folder
    places = {
        "model.path": folder / "model",
        "data.train_file": folder / "data" / "train.parquet",
        "data.eval_file": folder / "data" / "eval.parquet",
        "sft.train_file": folder / "data" / "demonstrations.parquet",
        "sft.output": folder / "model",
    }
    if recipe.environment.path:  # it is in the clone, wherever the demo is started
        places["environment.path"] = task.recipe.parents[2] / recipe.environment.path
    engine = [f"rollout.engine={usable_engine()}"] if usable_engine() != RolloutConfig().engine else []
    return [*(f"{key}={_quoted(place)}" for key, place in places.items()), *engine, *given]


def _quoted(path: Path) -> str:
    return json.dumps(str(path), ensure_ascii=False)


def _check_redis(recipe: Recipe) -> None:
    """Checks, before the warm-up, that a shared Redis holds no run with this id."""
    url, run_id = external_redis_url(recipe), recipe.run.run_id
    if not url:
        return
    with redis_required(), closing(Buffer(url, run_id, connect_timeout_seconds=REDIS_SECONDS)) as buffer:
        if buffer.exists():
            fault = f"run {run_id} in Redis at {buffer.place} exists already"
            raise RunExistsError(f"{fault}; give the demo another name: tandem demo run.run_id={run_id}-2")


def _set_aside(folder: Path, console: Console) -> None:
    """Renames the folder of an earlier demo to the next free number. Raises UserError if it still runs or is none."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not (folder / CONFIG_FILE).exists() and not (folder / LOCK_FILE).exists():
        raise ConfigError(f"{folder} is not empty and holds no run; move it away, or choose another run.folder")
    with RunLock(folder):  # a running demo holds the lock from its start
        number = 1
        while (target := folder.with_name(f"{folder.name}.{number}")).exists():
            number += 1
        config = folder / CONFIG_FILE
        if config.exists():  # its paths must follow the move, or a replay would start from the next demo's model
            values = read_values(config)
            moved = _moved(values, values["run"]["folder"], str(target))
            write_text(config, json.dumps(moved, indent=2) + "\n", private=True)
        folder.rename(target)
    print_line(console, f"The demo before this one is kept in {target}/")


def _moved(value: Any, old: str, new: str) -> Any:
    """A configuration with every path in the old folder changed to the new folder."""
    if isinstance(value, dict):
        return {key: _moved(inner, old, new) for key, inner in value.items()}
    if isinstance(value, list):
        return [_moved(inner, old, new) for inner in value]
    if isinstance(value, str) and (value == old or value.startswith(old + os.sep)):
        return new + value.removeprefix(old)
    return value


def _make_data(task: DemoTask, recipe: Recipe, seed: int) -> None:
    data = Path(recipe.data.train_file).parent
    with disk_full_error(data):
        task.write_data(data, seed)


def _make_and_warm_up(task: DemoTask, recipe: Recipe, settings: list[str], seed: int) -> int:
    """Returns 0, or 2 after a user's error, which the child has printed. Raises TandemError if the child fails."""
    base = recipe.folder / BASE_MODEL
    changes = [*settings, f"model.path={_quoted(base)}"]
    command = [sys.executable, "-m", MODEL_MAKER, str(base), str(seed), task.name, *changes]
    try:
        environment = {**CPU_ENVIRONMENT, **os.environ}
        done = subprocess.run(
            dying_with_parent(command), timeout=WARM_UP_DEADLINE_SECONDS, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        raise TandemError(
            f"the warm-up took longer than {WARM_UP_DEADLINE_SECONDS:.0f} s; is the machine busy?"
        ) from None
    if done.returncode not in (0, USER_ERROR):
        raise TandemError(f"the warm-up failed with exit code {done.returncode}; its own lines above say why")
    return done.returncode


def _show(folder: Path, seconds: float, console: Console) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    table = Table(title="What the demo did", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")

    def figure(name: str, form: str, scale: float = 1.0) -> str:
        value = summary[name]
        return "–" if value is None else format(scale * value, form)  # a very short run may lack some figures

    def pair(name: str, form: str) -> str:
        return f"{figure(f'sampler_{name}', form)} · {figure(f'trainer_{name}', form)}"

    table.add_row("accuracy before", figure("initial_accuracy", ".1%"))
    table.add_row("accuracy after", figure("final_accuracy", ".1%"))
    table.add_row("batches trained", f"{summary['train_steps']}")
    table.add_row("weight updates into the running sampler", f"{summary['weight_updates']}")
    table.add_row("sampler's stall an update", f"{figure('weight_stall_seconds_mean', '.1f', 1000.0)} ms")
    table.add_row("mean staleness (versions)", figure("mean_staleness", ".2f"))
    table.add_row("sampler · trainer tokens/s", pair("tokens_per_second", ",.0f"))
    table.add_row("sampler · trainer idle", pair("idle_fraction", ".0%"))
    table.add_row("whole demo", f"{seconds:.0f} s")
    console.print(table)
    print_line(
        console,
        f"Next:\n"
        f"  open {write_report(folder, None, None)} in a browser: curves, a timeline of all services, samples\n"
        f"  tandem ledger {folder}    every group accounted for\n"
        f"  tandem replay {folder}    train the recorded batches again, bit for bit\n"
        f"  tensorboard --logdir {folder}/tensorboard\n"
        f"  tandem eval {folder}/config.json model.path={folder}/hf\n"
        f"  tandem run {folder}/{CONFIG_FILE} run.run_id=mine run.folder=runs/mine run.staleness_budget=0",
    )
