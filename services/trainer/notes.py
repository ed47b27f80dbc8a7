"""What the ledger noted of the groups of a batch, kept beside the batch's record: a commit removes it from Redis.

Only `tandem ledger --group` reads it, so after a crash it may be missing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.history import GroupNotes, Lease, Return, group_notes
from tandem.trainer.batch.record import record_folder
from tandem.trainer.checkpoints.durable import write_file

NOTES_FILE = "leases.json"


def write_notes(buffer: Buffer, run_folder: Path, version: int, group_ids: Sequence[str]) -> None:
    """Adds the notes to a record, unless Redis has none. Raises OSError."""
    if found := group_notes(buffer.connection, group_ids):
        known = read_notes(run_folder, version) | found  # a rollback may have met groups that Redis had forgotten
        values = {group_id: _as_json(notes) for group_id, notes in known.items()}
        write_file(record_folder(run_folder, version) / NOTES_FILE, f"{json.dumps(values)}\n".encode())


def _as_json(notes: GroupNotes) -> dict[str, object]:
    leases = {stage: asdict(lease) for stage, lease in notes.leases.items()}
    return {
        "admitted_at": notes.admitted_at,
        "returns": [asdict(one) for one in notes.returns],
        "num_returns": notes.num_returns,
        "leases": leases,
    }


def read_notes(run_folder: Path, version: int) -> dict[str, GroupNotes]:
    """What `write_notes` wrote; nothing for a batch that is not trained yet."""
    try:
        text = (record_folder(run_folder, version) / NOTES_FILE).read_text(encoding="utf-8")
    except OSError:
        return {}
    found = {}
    for group_id, values in json.loads(text).items():
        values["returns"] = [Return(**one) for one in values["returns"]]
        values["leases"] = {stage: Lease(**one) for stage, one in values["leases"].items()}
        found[group_id] = GroupNotes(**values)
    return found
