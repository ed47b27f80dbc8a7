"""Rollback: makes the ledger agree with a checkpoint and the batches recorded on disk, batch by batch.

A trainer may die between any two calls. Each leaves a sound ledger and may be repeated, and its successor, which rolls
back to the same checkpoint and records, ends in the same state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tandem.protos.errors import LedgerError, RunFolderError
from tandem.services.buffer.connection import Connection

Run = Callable[..., object]
"""`Connection.run` or `TrainerCalls.change`: the name of a script and its arguments."""
Records = Mapping[int, Sequence[str]]
"""Recorded version → its group ids, ascending."""


def run_to_end(run: Run, verb: str, *arguments: str | int) -> None:
    """Runs a verb that does a part of its work at a time, until it answers that nothing is left."""
    while not run(verb, *arguments):
        pass


def recorded_version(connection: Connection) -> int:
    """The last version that the ledger has as recorded, -1 before the first one."""
    return int(connection.hash("meta").get(b"recorded_version", -1))


def check_records(connection: Connection, checkpoint_version: int, records: Records, known_version: int) -> None:
    """Compares the ledger with what is on disk, and changes nothing. `known_version` is the ledger's recorded version,
    read before the disk if a trainer may go on meanwhile.

    Raises RunFolderError if the disk ends below it, so it is not, or no longer, the run's folder; LedgerError if a
    group trained after the checkpoint is in no record, or a group is in two.
    """
    _check_recorded_once(records)
    before = 0
    for version, group_ids in records.items():
        connection.run("check_records", checkpoint_version, before, version, *group_ids)
        before = version
    if known_version > max(checkpoint_version, before):
        raise RunFolderError(
            f"the run folder ends with version {max(checkpoint_version, before)}, but the run's ledger has version "
            f"{known_version} as recorded: name the folder that holds it (run.folder), restore its batches/ and "
            "checkpoints/, or start a new run"
        )


def roll_back(run: Run, incarnation: int, checkpoint_version: int, records: Records) -> None:
    """See `Buffer.rollback`."""
    # The last version first, because exactly the trained groups above the published version are outstanding.
    for version in sorted(records, reverse=True):
        run("restore_batch", incarnation, checkpoint_version, version, *records[version])
    run_to_end(run, "end_rollback", incarnation, checkpoint_version, max([checkpoint_version, *records]))


def _check_recorded_once(records: Records) -> None:
    version_of: dict[str, int] = {}
    for version, group_ids in records.items():
        for group_id in group_ids:
            if version_of.setdefault(group_id, version) != version:
                raise LedgerError(f"group {group_id} is recorded in versions {version_of[group_id]} and {version}")
