"""Rollback: makes the ledger agree with a checkpoint and the batches recorded on disk, batch by batch.

A trainer may die between any two calls. Each leaves a sound ledger and may be repeated, and its successor, which rolls
back to the same checkpoint and records, ends in the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tandem.protos.errors import LedgerError

Run = Callable[..., object]
"""`Connection.run`: the name of a script and its arguments."""
Batches = Sequence[tuple[int, Sequence[str]]]
"""(version, group ids), ascending."""


def run_to_end(run: Run, verb: str, *arguments: str | int) -> None:
    """Runs a verb that does a part of its work at a time, until it answers that nothing is left."""
    while not run(verb, *arguments):
        pass


def roll_back(run: Run, incarnation: int, checkpoint_version: int, batches: Batches) -> None:
    """See `Buffer.rollback`. `batches` are those that are recorded."""
    _check_recorded_once(batches)
    before = 0
    for version, group_ids in batches:
        run("check_records", incarnation, checkpoint_version, before, version, *group_ids)
        before = version
    run("check_records", incarnation, checkpoint_version, before, "inf")
    # The last version first, because exactly the trained groups above the published version are outstanding.
    for version, group_ids in reversed(batches):
        run("restore_batch", incarnation, checkpoint_version, version, *group_ids)
    run_to_end(run, "end_rollback", incarnation, checkpoint_version, max(checkpoint_version, before))


def _check_recorded_once(batches: Batches) -> None:
    version_of: dict[str, int] = {}
    for version, group_ids in batches:
        for group_id in group_ids:
            if version_of.setdefault(group_id, version) != version:
                raise LedgerError(f"group {group_id} is recorded in versions {version_of[group_id]} and {version}")
