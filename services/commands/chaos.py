"""`tandem chaos`: runs a recipe under random faults. Imports nothing heavy up here, for `--help` loads it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.services.command_line import argument, command, console, option

chaos_app = typer.Typer()


@chaos_app.command(short_help="Run a recipe under random faults.")
@command
def chaos(
    recipe: Annotated[Path, argument(metavar="RECIPE", help="A recipe (TOML), or the config.json of a run.")],
    overrides: Annotated[
        list[str] | None,
        argument(metavar="KEY=VALUE", help="Settings that override the recipe, e.g. run.total_batches=500."),
    ] = None,
    faults: Annotated[int, typer.Option(min=1, help="Number of faults.")] = 50,
    seed: Annotated[int, typer.Option(min=0, help="Seed from which the faults are drawn.")] = 0,
    kinds: Annotated[
        str, option(help="Kinds of faults: kill,stop,cut,slow,disk,redis-loss. Default: all that are possible here.")
    ] = "",
    output: Annotated[Path | None, option("--json", metavar="FILE", help="Write the result there.")] = None,
) -> int:
    """Runs a recipe on this machine as `tandem run` does, and brings random faults over it: kill -9, SIGSTOP, broken
    and slow connections to Redis, a full disk, and a Redis that restarts without its last second. Checks the ledger
    every 5 s, and at the end that each group was trained once. Exits 1 if the run failed or lost something.

    Example: tandem chaos examples/recipes/arithmetic.toml --faults 20 --kinds kill run.run_id=hurt
    """
    from tandem.services.commands.chaos_run import run_under_faults

    return run_under_faults(recipe, overrides or [], faults, seed, kinds, output, console())
