"""`tandem env …`: environments from the command line. Heavy imports are local, so that `--help` is fast."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tandem.services.command_line import argument, command, option

env_app = typer.Typer(
    no_args_is_help=True,
    help="Checks environments. See docs/environments.md.\n\n"
    "Example: tandem env check examples/environments/guess_number.py:GuessNumber",
)


@env_app.command("check", short_help="Check a class, as training would use it.")
@command
def env_check(
    path: Annotated[str, argument(metavar="MODULE:CLASS", help="The class: module.path:Class or file.py:Class.")],
    arguments: Annotated[str, option(metavar="JSON", help="Its keyword arguments, an object.")] = "",
    task: Annotated[
        str,
        option(
            metavar="FILE|JSON",
            help="The task: a dataset file, whose first row it is, or an object with columns of a row.",
        ),
    ] = "",
    actions: Annotated[
        Path | None,
        option(metavar="FILE", help="What the policy says: a JSON list of texts. Default: a few short ones."),
    ] = None,
    step_seconds: Annotated[
        float, typer.Option(min=0.1, help="Longest time for the start of an episode or one step.")
    ] = 30.0,
    variable: Annotated[
        list[str] | None, option(metavar="NAME", help="Another environment variable that the class sees.")
    ] = None,
) -> int:
    """Plays episodes of a class without a policy, and checks: import, contract, determinism, seeds, concurrency,
    cancellation, close, leaks, and snapshots if it has them. Prints one line a check. Exits 1 if one failed.

    Example: tandem env check my_game.py:MyGame --task data/train.parquet
    """
    import asyncio

    from tandem.services.commands.env_check import ConformanceChecks, environment_to_check, read_actions, read_task

    config = environment_to_check(path, arguments, step_seconds, variable or ())
    checks = ConformanceChecks(config, read_task(task), read_actions(actions))
    return 0 if asyncio.run(checks.make_all()) else 1
