"""`tandem plan`: proposes how to split GPUs between trainer and samplers, from the measured rates of a run."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.table import Table

from tandem.protos.errors import UserError
from tandem.services.command_line import print_line
from tandem.services.config import Recipe
from tandem.services.planning.calibration import measure
from tandem.services.planning.proposals import ASSUMPTIONS, Candidate, candidates, predict, with_split

_SHOWN = 5
_MEASURED_BATCHES = 30
_WAITS = 0.1  # a side that is idle for a larger share waits for the other one


def show_plan(file: Path, recipe: Recipe, gpus: int, run: Path | None, console: Console) -> int:
    """Prints a few splits of the GPUs, the best first. Raises UserError without a measured run."""
    if run is None:
        short = f"run.run_id=measured run.folder=runs/measured run.total_batches={_MEASURED_BATCHES}"
        raise UserError(
            f"tandem plan needs measured rates: run `tandem run {file} {short} run.staleness_budget=0` on few GPUs, "
            "then repeat this command with --from runs/measured"
        )
    measured = measure(run)
    simulated = predict(measured, measured.recipe).steps_per_minute
    print_line(
        console,
        f"{run}: {measured.steps_per_minute:.2f} steps/min in {measured.num_batches} batches; the simulation of the "
        f"same setting gives {simulated:.2f} ({simulated / measured.steps_per_minute - 1.0:+.0%})\n",
    )
    found = candidates(measured, recipe, gpus)
    console.print(_table(found[:_SHOWN]))
    print_line(console, "\n" + _reason(found, recipe))
    best = found[0]
    rollout = with_split(recipe, best.ranks, best.samplers, best.width).rollout
    sampling = " ".join(
        f"rollout.{key}={getattr(rollout, key)}"
        for key in ("num_replicas", "tensor_parallel_size", "max_groups_in_flight")
    )
    print_line(console, f"tandem run {file} trainer.num_ranks={best.ranks} {sampling}\n")
    print_line(console, ASSUMPTIONS)
    return 0


def _table(shown: list[Candidate]) -> Table:
    head = ("ranks", "samplers", "GPUs each", "steps/min", "trainer idle", "samplers idle", "staleness")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in head:
        table.add_column(name, justify="right")
    for one in shown:
        prediction = one.prediction
        table.add_row(
            *(str(one.ranks), str(one.samplers), str(one.width), f"{prediction.steps_per_minute:.2f}"),
            *(f"{prediction.trainer_idle:.0%}", f"{prediction.sampler_idle:.0%}", f"{prediction.mean_staleness:.2f}"),
        )
    return table


def _reason(found: list[Candidate], recipe: Recipe) -> str:
    """Why the first candidate is the best, in one or two sentences."""
    prediction, best = found[0].prediction, found[0]
    fastest = max(one.prediction.steps_per_minute for one in found)
    if prediction.steps_per_minute < fastest:
        why = f"The first is nearly as fast as the fastest ({fastest:.2f}), with less staleness or fewer GPUs"
    else:
        why = f"The first is the fastest of {len(found)} simulated splits"
    trainer, sampler = prediction.trainer_idle, prediction.sampler_idle
    if trainer > _WAITS and sampler > _WAITS:
        budget = f"run.staleness_budget = {recipe.run.staleness_budget}"
        rest = f"both sides wait for each other at {budget}; a larger budget would use the GPUs better"
    elif trainer > _WAITS:
        rest = f"the trainer waits {trainer:.0%} of its time, and fewer ranks with more samplers are slower still"
    elif sampler > _WAITS:
        rest = f"its trainer is busy {1 - trainer:.0%} of the time, and samplers have {sampler:.0%} to spare"
    else:
        rest = f"trainer and samplers are both busy at least {1 - max(trainer, sampler):.0%} of the time"
    return f"{why}: {rest}. It uses {best.gpus} GPUs."
