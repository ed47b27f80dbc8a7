"""`tandem demo`: makes its own data and model, warms the model up, runs the whole ring on it, and shows what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from protos.errors import ConfigError, TandemError
from services.arithmetic import write_task
from services.config import Recipe, load_recipe
from services.process import die_with_parent
from services.supervisor import run_recipe

RECIPE = Path(__file__).resolve().parents[1] / "examples" / "recipes" / "arithmetic.toml"
WARM_UP_DEADLINE_SECONDS = 900.0
BASE_MODEL = "base"  # beside the data, in the run folder


def main(seed: int, overrides: list[str]) -> int:
    """Runs the demo in `runs/demo` (or the overridden `run.folder`). Returns the exit code of the run."""
    if not RECIPE.is_file():
        raise ConfigError(
            f"{RECIPE}: no such file; the demo runs from a clone of the repository, installed with `make setup`"
        )
    console = Console()
    started = time.monotonic()
    recipe = load_recipe(RECIPE, [f"run.seed={seed}", *overrides])
    folder = recipe.folder
    _set_aside(folder, console)
    console.print(
        f"Tandem demo: a model that forgets to carry learns to add. Everything goes to {folder}/", highlight=False
    )
    _make_task_and_model(recipe, seed)
    console.print(
        f"· data and a random model are made ({time.monotonic() - started:.0f} s); imitating a sloppy pupil …",
        highlight=False,
    )
    _warm_up(recipe, seed, overrides)
    console.print("· warmed up; now sampler, scorer and trainer run at once:", highlight=False)
    code = run_recipe(recipe, False, console=console)
    if code == 0:
        _show(folder, time.monotonic() - started, console)
    return code


def _set_aside(folder: Path, console: Console) -> None:
    # An earlier demo is the user's: it is kept under the next free number, never overwritten.
    if not (folder / "config.json").exists():
        return
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    folder.rename(target)
    console.print(f"The demo before this one is kept in {target}/", highlight=False)


def _make_task_and_model(recipe: Recipe, seed: int) -> None:
    write_task(Path(recipe.data.train_file).parent, seed)
    # In a process of its own: torch is needed for two seconds, and would stay in the supervisor's memory for the whole run.
    _child([sys.executable, "-m", "services.demo", str(recipe.folder / BASE_MODEL), str(seed)], "making the model")


def _warm_up(recipe: Recipe, seed: int, overrides: list[str]) -> None:
    changes = [f"run.seed={seed}", *overrides, f'model.path="{recipe.folder / BASE_MODEL}"']
    _child([sys.executable, "-m", "services.cli", "sft", str(RECIPE), *changes], "the warm-up")


def _child(command: list[str], what: str) -> None:
    try:
        # One thread: for a model this small a second one gains little, and loses a lot on a busy machine.
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        done = subprocess.run(
            command, timeout=WARM_UP_DEADLINE_SECONDS, env=environment, check=False, preexec_fn=die_with_parent
        )
    except subprocess.TimeoutExpired:
        raise TandemError(f"{what} took longer than {WARM_UP_DEADLINE_SECONDS:.0f} s; is the machine busy?") from None
    if done.returncode:
        raise TandemError(f"{what} failed with exit code {done.returncode}; its own lines above say why")


def _show(folder: Path, seconds: float, console: Console) -> None:
    summary = json.loads((folder / "summary.json").read_text())
    table = Table(title="What the demo did", title_justify="left", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    rows = [
        ("accuracy before", f"{summary['initial_accuracy']:.1%}"),
        ("accuracy after", f"{summary['final_accuracy']:.1%}"),
        ("batches trained", f"{summary['train_steps']}"),
        ("weight updates into the running sampler", f"{summary['weight_updates']}"),
        ("sampler's stall an update", f"{1000 * summary['weight_stall_seconds_mean']:.1f} ms"),
        ("mean staleness (versions)", f"{summary['mean_staleness']:.2f}"),
        (
            "sampler · trainer tokens/s",
            f"{summary['sampler_tokens_per_second']:,.0f} · {summary['trainer_tokens_per_second']:,.0f}",
        ),
        ("sampler · trainer idle", f"{summary['sampler_idle_fraction']:.0%} · {summary['trainer_idle_fraction']:.0%}"),
        ("whole demo", f"{seconds:.0f} s"),
    ]
    for name, value in rows:
        table.add_row(name, value)
    console.print(table)
    console.print(
        f"Next:\n"
        f"  tandem ledger {folder}    every group accounted for\n"
        f"  tandem replay {folder}    train the recorded batches again, bit for bit\n"
        f"  tensorboard --logdir {folder}/tensorboard\n"
        f"  tandem eval {folder}/config.json model.path={folder}/hf\n"
        f"  tandem run examples/recipes/arithmetic.toml run.run_id=mine run.staleness_budget=0",
        highlight=False,
        markup=False,
        soft_wrap=True,
    )


def _make_model(folder: str, seed: str) -> None:
    from services.tiny_model import PLAIN_TEMPLATE, build_tiny_model

    build_tiny_model(
        Path(folder), hidden=128, layers=4, seed=int(seed), initializer_range=0.02, chat_template=PLAIN_TEMPLATE
    )


if __name__ == "__main__":
    _make_model(*sys.argv[1:])
