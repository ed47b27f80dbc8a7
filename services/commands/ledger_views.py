"""What `tandem ledger` and `tandem repair` show."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.table import Table

from tandem.protos.errors import UnavailableError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.history import finished_groups
from tandem.services.command_line import cell, plain, print_line
from tandem.services.commands.group_biography import biography, row_namer
from tandem.services.commands.status import counts_table, ledger_of, show_each
from tandem.services.config import load_resolved
from tandem.services.run.folder import CONFIG_FILE, external_redis_url, running
from tandem.services.trainer.folder_check import Comparison, compare_with_folder
from tandem.services.trainer.repair import not_running, plan_repair

_WATCH_SECONDS = 2.0
_LISTED_GROUPS = 5  # of each reason


def show_ledger(folder: Path, console: Console, *, with_folder: bool, as_json: bool) -> int:
    """Prints the count of each state and what contradicts them, in the ledger and, if asked for, in the run folder.
    Returns 1 if anything does.
    """
    with ledger_of(folder) as buffer:
        counts, violations = buffer.counts(), buffer.verify()
        found = compare_with_folder(buffer, folder) if with_folder else Comparison()
    violations += found.violations
    if as_json:
        notes = {"notes": found.notes} if with_folder else {}
        console.print_json(json.dumps({"counts": counts, "violations": violations} | notes))
        return 1 if violations else 0
    console.print(counts_table(counts))
    sound = "sound: admitted = the sum over all states" + (", and the folder holds the same" if with_folder else "")
    print_line(console, "\n".join([f"note: {note}" for note in found.notes] + (_marked(violations) or [sound])))
    if counts["set_aside"]:
        print_line(console, f"prompts set aside: {counts['set_aside']}, see `tandem ledger {folder} --dropped`")
    return 1 if violations else 0


def watch_ledger(folder: Path, console: Console) -> int:
    """Shows the counts and what contradicts them, every 2 s until the run ends. Returns 1 if at last something does."""
    violations: list[str] = []

    def views(buffer: Buffer) -> Iterator[Group]:
        is_external = bool(external_redis_url(load_resolved(folder / CONFIG_FILE)))
        while True:
            try:
                counts, violations[:] = buffer.counts(), buffer.verify()
            except UnavailableError:
                if running(folder) is None:
                    return  # the run has ended, and its Redis with it
                raise
            yield Group(counts_table(counts), plain("\n".join([time.strftime("%T"), *_marked(violations)])))
            has_ended = bool(buffer.connection.hash("meta").get(b"ended"))
            if has_ended or (running(folder) is None and not is_external):
                return
            time.sleep(_WATCH_SECONDS)

    with ledger_of(folder) as buffer:
        show_each(views(buffer), console)
    return 1 if violations else 0


def show_dropped(folder: Path, console: Console, *, as_json: bool) -> int:
    """Prints how many groups were dropped for each reason, and the prompts that are set aside with row and error."""
    with ledger_of(folder) as buffer:
        finished, set_aside, errors = finished_groups(buffer.connection), buffer.set_aside(), buffer.drop_errors()
    by_reason = {
        name.removeprefix("dropped:"): sorted(groups, key=_place)
        for name, groups in finished.items()
        if name.startswith("dropped:") and groups
    }
    row_of = row_namer(load_resolved(folder / CONFIG_FILE))
    prompts = [{"group": one, "row": row_of(one), "why": set_aside[one]} for one in sorted(set_aside, key=_place)]
    if as_json:
        console.print_json(json.dumps({"dropped": by_reason, "set_aside": prompts}))
        return 0
    if not by_reason:
        print_line(console, "no group was dropped")
        return 0
    table = Table("reason", "groups", "which", "first error", box=None, header_style="bold", pad_edge=False)
    for reason, groups in sorted(by_reason.items(), key=lambda item: (-len(item[1]), item[0])):
        more = ", …" if len(groups) > _LISTED_GROUPS else ""
        which = ", ".join(groups[:_LISTED_GROUPS]) + more
        table.add_row(cell(reason), str(len(groups)), which, cell(errors.get(reason, "")))
    console.print(table)
    for prompt in prompts:
        print_line(console, f"set aside: group {prompt['group']}, {prompt['row']}: {prompt['why']}")
    return 0


def show_group(folder: Path, group_id: str, console: Console, *, as_json: bool) -> int:
    """Prints what is known of a group."""
    with ledger_of(folder) as buffer:
        told = biography(buffer, load_resolved(folder / CONFIG_FILE), group_id)
    if as_json:
        console.print_json(json.dumps(told))
        return 0
    table = Table.grid(padding=(0, 2))
    for name, lines in told.items():
        for number, line in enumerate(lines):
            table.add_row(name if number == 0 else "", cell(line))
    console.print(table)
    return 0


def repair_run(folder: Path, console: Console, *, dry_run: bool) -> int:
    """Repairs a run, or only says what it would do. Returns 1 if something cannot be repaired."""
    with ledger_of(folder) as buffer, not_running(buffer, folder):
        plan = plan_repair(buffer, folder)
        if not plan.steps and not plan.beyond:
            print_line(console, "nothing to repair")
        for step in plan.steps:
            print_line(console, f"would {step.text}" if dry_run else step.text)
            if not dry_run:
                step.do()
        if plan.steps and not dry_run:  # a rollback may have mended what the ledger contradicted
            plan = plan_repair(buffer, folder)
            plan.beyond += [f"{step.text} has not helped" for step in plan.steps]
    for line in plan.beyond:
        print_line(console, f"cannot be repaired: {line}")
    return 1 if plan.beyond else 0


def _marked(violations: Sequence[str]) -> list[str]:
    return [f"VIOLATION: {one}" for one in violations]


def _place(group_id: str) -> tuple[int, int]:
    epoch, _, index = group_id.partition("-")
    return int(epoch), int(index)
