"""The record of a batch in `batches/<version>` of the run folder, written to disk before the batch's first gradient.

`groups.arrow` is an Arrow IPC file with one row per segment, in the batch's order; to read it, use
`pyarrow.ipc.open_file(path).read_all()`. Its columns are `group_id` and `prompt` (JSON), then the payload's.
`plan.json` is the TrainBatch. `advantages.json`, written once the batch is trained, has each trajectory's mean
advantage by `<group id>/<trajectory id>`; only what shows the batch reads it.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import pyarrow as pa

from tandem.protos.codec import (
    PROMPT_KEY,
    SCHEMA,
    SCHEMA_VERSION,
    VERSION_KEY,
    EncodedGroups,
    batch_to_payload,
    check_schema_version,
)
from tandem.protos.errors import DataError, LedgerError
from tandem.protos.row_headers import decode_headers, header_lists
from tandem.protos.types import PlannedRow, TrainBatch
from tandem.trainer.checkpoints.durable import REMOVED, atomic_folder, write_file

BATCHES_FOLDER = "batches"
PLAN_FILE = "plan.json"
GROUPS_FILE = "groups.arrow"
ADVANTAGES_FILE = "advantages.json"

_PLAN_COLUMNS = tuple(PlannedRow.__dataclass_fields__)
_plan_values = attrgetter(*_PLAN_COLUMNS)
_GROUP_FIELDS = [
    pa.field("group_id", pa.string(), nullable=False),
    pa.field("prompt", pa.dictionary(pa.int32(), pa.string()), nullable=False),  # stored once per group
]
_FILE_SCHEMA = pa.schema([*_GROUP_FIELDS, *SCHEMA], {VERSION_KEY: str(SCHEMA_VERSION).encode()})


def record_folder(run_folder: Path, version: int) -> Path:
    """The folder that records the batch of `version`."""
    return Path(run_folder) / BATCHES_FOLDER / f"{version:06d}"


def write_record(run_folder: Path, batch: TrainBatch, groups: EncodedGroups) -> dict[str, object]:
    """Writes the batch and its groups, in their order, atomically. Returns the batch as a JSON value once it is on
    disk. Raises LedgerError if this version is already recorded, by this trainer or by one that runs beside it;
    DataError if the groups are not those of the batch; EnvironmentLackError if the disk is full.
    """
    folder = record_folder(run_folder, batch.policy_version)
    exists = LedgerError(f"{folder} exists: version {batch.policy_version} was trained on another batch")
    if folder.exists():
        raise exists
    if (given := tuple(groups.batches)) != batch.group_ids:
        raise DataError(f"batch {batch.policy_version}: {_difference(batch.group_ids, given)}")
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _FILE_SCHEMA) as writer:
        writer.write_batch(_to_rows(groups))
    plan = batch_to_json(batch)
    try:
        with atomic_folder(folder, writer=str(batch.incarnation), replaces=False) as begun:
            (begun / GROUPS_FILE).write_bytes(sink.getvalue())
            (begun / PLAN_FILE).write_text(json.dumps(plan) + "\n", encoding="utf-8")
    except FileExistsError:
        raise exists from None
    return plan


def write_advantages(run_folder: Path, version: int, advantages: Mapping[tuple[str, int], float]) -> None:
    """Adds the mean advantages of the trajectories to a record. Raises OSError."""
    values = {f"{group_id}/{number}": value for (group_id, number), value in advantages.items()}
    write_file(record_folder(run_folder, version) / ADVANTAGES_FILE, f"{json.dumps(values)}\n".encode())


def read_advantages(run_folder: Path, version: int) -> dict[tuple[str, int], float]:
    """What `write_advantages` wrote; nothing for a batch that is not trained yet."""
    try:
        text = (record_folder(run_folder, version) / ADVANTAGES_FILE).read_text(encoding="utf-8")
    except OSError:
        return {}
    found = [(*key.split("/"), value) for key, value in json.loads(text).items()]
    return {(group_id, int(number)): float(value) for group_id, number, value in found}


def read_record(run_folder: Path, version: int) -> tuple[TrainBatch, dict[str, bytes]]:
    """The batch and its payloads as they were written: `decode_group` restores every array bit for bit. Raises
    DataError if there is no such record, or it cannot be read.
    """
    batch = read_plan(run_folder, version)
    path = record_folder(run_folder, version) / GROUPS_FILE
    try:
        with pa.ipc.open_file(path) as reader:
            table = reader.read_all()
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    check_schema_version(table.schema.metadata)
    payloads = _to_payloads(table)
    if set(payloads) != set(batch.group_ids):
        raise DataError(f"{path} holds other groups than {PLAN_FILE} beside it")
    return batch, payloads


def read_plan(run_folder: Path, version: int) -> TrainBatch:
    """The batch of a record, without its payloads. Raises DataError if there is none, or that of another version."""
    path = record_folder(run_folder, version) / PLAN_FILE
    try:
        batch = batch_from_json(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    if batch.policy_version != version:
        raise DataError(
            f"{path} is the plan of version {batch.policy_version}; restore the folder of version {version}"
        )
    return batch


def recorded_versions(run_folder: Path) -> list[int]:
    """Versions with a recorded batch, ascending."""
    folder = Path(run_folder) / BATCHES_FOLDER
    return sorted(int(entry.name) for entry in folder.glob("[0-9]*") if entry.name.isdigit())


def prune_records(run_folder: Path, last: int) -> None:
    """Deletes the records up to version `last`, the oldest first, so that those that are left have no gap."""
    folder = Path(run_folder) / BATCHES_FOLDER
    for version in recorded_versions(run_folder):
        if version <= last:
            record = record_folder(run_folder, version)
            record.rename(record.with_name(record.name + REMOVED))
    for removed in folder.glob(f"*{REMOVED}"):  # also those of a process that was killed here
        shutil.rmtree(removed)


def batch_to_json(batch: TrainBatch) -> dict[str, object]:
    """The batch as a JSON value."""
    return {
        "policy_version": batch.policy_version,
        "incarnation": batch.incarnation,
        "group_ids": list(batch.group_ids),
        "num_micro_batches": list(batch.num_micro_batches),
        "packing": batch.packing,
        "plan_columns": list(_PLAN_COLUMNS),
        "plan": [*map(_plan_values, batch.plan)],
        "headers": header_lists(batch.headers),
    }


def batch_from_json(values: Mapping[str, Any]) -> TrainBatch:
    """The inverse of `batch_to_json`."""
    return TrainBatch(
        policy_version=values["policy_version"],
        incarnation=values["incarnation"],
        group_ids=tuple(values["group_ids"]),
        headers=decode_headers(json.dumps(values["headers"])),
        plan=tuple(PlannedRow(**dict(zip(values["plan_columns"], row, strict=True))) for row in values["plan"]),
        num_micro_batches=tuple(values["num_micro_batches"]),
        packing=values["packing"],
    )


def _difference(wanted: Sequence[str], given: Sequence[str]) -> str:
    missing = [group_id for group_id in wanted if group_id not in given]
    return f"no payload of group {missing[0]}" if missing else "the payloads are of more groups, or in another order"


def _to_rows(groups: EncodedGroups) -> pa.RecordBatch:
    numbers = pa.array(groups.owners)
    ids, prompts = (pa.array(texts, pa.string()) for texts in (list(groups.batches), groups.prompts))
    columns = [ids.take(numbers), pa.DictionaryArray.from_arrays(numbers, prompts), *groups.segments.columns]
    return pa.RecordBatch.from_arrays(columns, schema=_FILE_SCHEMA)


def _to_payloads(table: pa.Table) -> dict[str, bytes]:
    names = [name for name in SCHEMA.names if name in table.column_names]  # an older record lacks the last columns
    segments = table.select(names).combine_chunks()
    payloads: dict[str, bytes] = {}
    first = 0
    for group_id, rows in groupby(table.column("group_id").to_pylist()):
        count = len(list(rows))
        prompt = table.column("prompt")[first].as_py()
        metadata = {VERSION_KEY: table.schema.metadata[VERSION_KEY], PROMPT_KEY: prompt.encode()}
        (batch,) = segments.slice(first, count).to_batches()
        payloads[group_id] = batch_to_payload(batch.replace_schema_metadata(metadata))
        first += count
    return payloads
