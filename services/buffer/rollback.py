"""Rollback: makes the ledger agree with a checkpoint and the batches recorded on disk, batch by batch.

A trainer may die between any two calls. Each leaves a sound ledger and may be repeated, and its successor, which rolls
back to the same checkpoint and records, ends in the same state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tandem.protos.errors import LedgerError
from tandem.services.buffer.connection import Connection


def roll_back(
    connection: Connection, incarnation: int, checkpoint_version: int, batches: Mapping[int, Sequence[str]]
) -> None:
    """See `Buffer.rollback`. `batches` has the group ids of the recorded versions, in ascending order."""
    _check_recorded_once(batches)
    before = 0
    for version, group_ids in batches.items():
        connection.run("check_records", incarnation, checkpoint_version, before, version, *group_ids)
        before = version
    connection.run("check_records", incarnation, checkpoint_version, before, "inf")
    # The last version first, because exactly the trained groups above the published version are outstanding.
    for version in reversed(batches):
        connection.run("restore_batch", incarnation, checkpoint_version, version, *batches[version])
    connection.run_to_end("end_rollback", incarnation, checkpoint_version, max([checkpoint_version, *batches]))


def _check_recorded_once(batches: Mapping[int, Sequence[str]]) -> None:
    version_of: dict[str, int] = {}
    for version, group_ids in batches.items():
        for group_id in group_ids:
            if version_of.setdefault(group_id, version) != version:
                raise LedgerError(f"group {group_id} is recorded in versions {version_of[group_id]} and {version}")
