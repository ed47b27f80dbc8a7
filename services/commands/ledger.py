"""`tandem ledger` and `tandem repair`: whether a run has lost a group, what became of one, and what can be set right.

Imports nothing heavy up here, for `--help` loads it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from tandem.services.command_line import argument, command, console, option

ledger_app = typer.Typer()

RunArgument = Annotated[str | None, argument(metavar="RUN", help="A run folder. Default: the newest one under runs/.")]


@ledger_app.command(short_help="Check that no group of a run was lost.")
@command
def ledger(
    run_folder: RunArgument = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Compare it with the batches and checkpoints in the folder, too.")
    ] = False,
    group: Annotated[str, option(metavar="ID", help="Tell what became of one group, e.g. 0-17.")] = "",
    dropped: Annotated[
        bool, typer.Option("--dropped", help="List why groups were dropped, and the prompts that failed too often.")
    ] = False,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew every 2 s, until the run ends.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Counts a run's groups in every state and checks that none was lost or counted twice. Exits 1 if one was.

    Works while the run goes on, and afterwards. Example: tandem ledger runs/demo --verify
    """
    from tandem.protos.errors import UserError
    from tandem.services.commands.ledger_views import show_dropped, show_group, show_ledger, watch_ledger
    from tandem.services.run.folder import find_run

    if verify + dropped + watch + bool(group) > 1 or (watch and as_json):
        raise UserError("give one of --verify, --group, --dropped and --watch at a time, and --watch without --json")
    folder = find_run(run_folder)
    if group:
        return show_group(folder, group, console(), as_json=as_json)
    if dropped:
        return show_dropped(folder, console(), as_json=as_json)
    if watch:
        return watch_ledger(folder, console())
    return show_ledger(folder, console(), with_folder=verify, as_json=as_json)


@ledger_app.command(short_help="Set right what a crash or a lost disk left of a run.")
@command
def repair(
    run_folder: RunArgument = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what it would do.")] = False,
) -> int:
    """Sets a run right that is not running: removes what killed writers have left in its folder, returns leases whose
    holder is gone, and sets the ledger to what the folder holds, as a trainer that starts. Says each step before it
    takes it, and what to do about what it cannot repair; then it exits 1.

    Example: tandem repair runs/mine --dry-run
    """
    from tandem.services.commands.ledger_views import repair_run
    from tandem.services.run.folder import find_run

    return repair_run(find_run(run_folder), console(), dry_run=dry_run)
