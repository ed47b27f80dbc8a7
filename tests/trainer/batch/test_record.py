"""Records in batches/<version>: written atomically, readable with pyarrow alone, and read back bit for bit."""

from __future__ import annotations

import errno
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from tandem.protos.codec import VERSION_KEY, EncodedGroups, decode_group, encode_group
from tandem.protos.errors import DataError, EnvironmentLackError, LedgerError, SchemaVersionError
from tandem.protos.types import TrainBatch, TrajectoryGroup
from tandem.trainer.batch.record import (
    GROUPS_FILE,
    PLAN_FILE,
    batch_from_json,
    batch_to_json,
    prune_records,
    read_record,
    record_folder,
    recorded_versions,
    write_record,
)
from tandem.trainer.batch.rejected import prune_rejected, read_rejected, write_rejected
from tandem.trainer.checkpoints.durable import atomic_folder
from tests.support.training_groups import make_batch, make_group, make_payloads, with_sampling_masks

Recorded = tuple[TrainBatch, dict[str, TrajectoryGroup]]


@pytest.fixture
def recorded() -> Recorded:
    groups = [
        make_group(7, versions=(0, 1, 2), baseline=True),
        make_group(3, rewards=[1.0, None, 0.25, 0.0], num_segments=2),
        with_sampling_masks(make_group(5, num_samples=1)),
    ]
    return make_batch(groups, policy_version=3, optimizer_steps=2, world_size=2)


def test_a_record_survives_a_round_trip(tmp_path: Path, recorded: Recorded) -> None:
    batch, groups = recorded
    payloads = make_payloads(groups.values())
    write_record(tmp_path, batch, EncodedGroups.of(payloads))
    read_batch, read_payloads = read_record(tmp_path, 3)
    assert read_batch == batch
    assert list(read_payloads) == list(batch.group_ids)
    again = {group_id: encode_group(decode_group(payload)) for group_id, payload in read_payloads.items()}
    assert again == payloads  # bit for bit
    restored = decode_group(read_payloads["0-3"])
    for row, expected in zip(restored.scored_rows, groups["0-3"].scored_rows, strict=True):
        assert row.reward == expected.reward
        for segment, original in zip(row.trajectory.segments, expected.trajectory.segments, strict=True):
            assert segment.behavior_logprobs.tobytes() == original.behavior_logprobs.tobytes()
            assert segment.ids.tolist() == original.ids.tolist()
            assert segment.spans == original.spans


def test_pyarrow_alone_reads_one_row_per_segment(tmp_path: Path, recorded: Recorded) -> None:
    batch, groups = recorded
    parts = {"form": 0.5, "right/numeric": 1.0}
    told = [
        replace(one, rows=tuple(replace(row, breakdown=parts) for row in one.scored_rows)) for one in groups.values()
    ]
    write_record(tmp_path, batch, EncodedGroups.of(make_payloads(told)))
    table = pa.ipc.open_file(record_folder(tmp_path, 3) / GROUPS_FILE).read_all()
    assert table.num_rows == len(batch.headers)
    assert table.column("group_id").to_pylist() == [header.group_id for header in batch.headers]
    assert json.loads(table.column("prompt")[0].as_py())["index"] == 7
    assert table.column("reward").to_pylist() == [header.reward for header in batch.headers]
    assert [json.loads(text) for text in table.column("breakdown").to_pylist()] == [parts] * len(batch.headers)
    assert table.column("ids")[0].as_py() == groups["0-7"].scored_rows[0].trajectory.segments[0].ids.tolist()
    assert json.loads((record_folder(tmp_path, 3) / PLAN_FILE).read_text())["policy_version"] == 3


def test_versions_are_listed_and_never_overwritten(tmp_path: Path, recorded: Recorded) -> None:
    batch, groups = recorded
    assert recorded_versions(tmp_path) == []
    write_record(tmp_path, batch, EncodedGroups.of(make_payloads(groups.values())))
    (tmp_path / "batches" / "000009.partial").mkdir()
    assert recorded_versions(tmp_path) == [3]
    with pytest.raises(LedgerError, match="000003 exists"):
        write_record(tmp_path, batch, EncodedGroups.of(make_payloads(groups.values())))


def test_pruned_records_are_gone_and_what_a_killed_process_left_of_them_too(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, groups = recorded
    for version in range(1, 6):
        write_record(tmp_path, replace(batch, policy_version=version), EncodedGroups.of(make_payloads(groups.values())))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(shutil, "rmtree", killed)
        prune_records(tmp_path, 2)
    assert recorded_versions(tmp_path) == [3, 4, 5]
    prune_records(tmp_path, 3)
    assert sorted(path.name for path in (tmp_path / "batches").iterdir()) == ["000004", "000005"]
    prune_records(tmp_path, 0)
    assert recorded_versions(tmp_path) == [4, 5]


def test_rejected_groups_may_be_pruned_while_they_are_read(tmp_path: Path) -> None:
    for version, group_id in ((1, "0-1"), (1, "0-2"), (2, "0-3")):
        write_rejected(tmp_path, version, group_id, "stale", b"payload")
    reading = read_rejected(tmp_path, 1)
    assert next(reading) == ("stale", b"payload")
    prune_rejected(tmp_path, 1)
    assert list(reading) == [] and len(list(read_rejected(tmp_path, 2))) == 1


def killed(_folder: Path) -> None:
    raise KeyboardInterrupt


def test_a_missing_payload_or_record_is_named(tmp_path: Path, recorded: Recorded) -> None:
    batch, groups = recorded
    payloads = make_payloads(groups.values())
    del payloads["0-5"]
    with pytest.raises(DataError, match="no payload of group 0-5"):
        write_record(tmp_path, batch, EncodedGroups.of(payloads))
    in_another_order = dict(reversed(make_payloads(groups.values()).items()))
    with pytest.raises(DataError, match="in another order"):
        write_record(tmp_path, batch, EncodedGroups.of(in_another_order))
    assert recorded_versions(tmp_path) == []
    with pytest.raises(DataError, match="000004"):
        read_record(tmp_path, 4)


def test_a_later_schema_is_refused(tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, groups = recorded
    write_record(tmp_path, batch, EncodedGroups.of(make_payloads(groups.values())))
    monkeypatch.setattr("tandem.protos.codec.SCHEMA_VERSION", 0)
    with pytest.raises(SchemaVersionError, match="update Tandem"):
        read_record(tmp_path, 3)


def test_a_record_of_schema_version_1_is_read(tmp_path: Path) -> None:
    batch, groups = make_batch([make_group(3), make_group(4)], policy_version=3)
    write_record(tmp_path, batch, EncodedGroups.of(make_payloads(groups.values())))
    file = record_folder(tmp_path, 3) / GROUPS_FILE
    table = pa.ipc.open_file(file.read_bytes()).read_all().drop_columns(["sampling_mask"])
    table = table.replace_schema_metadata({VERSION_KEY: b"1"})
    with pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)
    read, payloads = read_record(tmp_path, 3)
    assert read == batch
    again = make_payloads(decode_group(payload) for payload in payloads.values())
    assert again == make_payloads(groups.values())


def test_a_full_disk_is_a_one_line_error_and_leaves_no_files(
    tmp_path: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, groups = recorded

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tandem.trainer.checkpoints.durable.os.fsync", full)
    with pytest.raises(EnvironmentLackError, match=r"no space left on the disk of .*000003"):
        write_record(tmp_path, batch, EncodedGroups.of(make_payloads(groups.values())))
    assert list((tmp_path / "batches").iterdir()) == []


def test_a_batch_survives_json(recorded: Recorded) -> None:
    batch, _ = recorded
    assert batch_from_json(json.loads(json.dumps(batch_to_json(batch)))) == batch


def test_of_two_trainers_that_record_one_version_the_first_wins(tmp_path: Path, recorded: Recorded) -> None:
    batch, groups = recorded
    payloads = make_payloads(groups.values())
    first, second = replace(batch, incarnation=3), replace(batch, incarnation=4)
    slept = pytest.raises(FileExistsError)
    with slept, atomic_folder(record_folder(tmp_path, 3), writer="3", replaces=False) as begun:
        (begun / "plan.json").write_text("half")
        write_record(tmp_path, second, EncodedGroups.of(payloads))
        assert not begun.exists(), "what the first has begun is of no use"
        begun.mkdir()  # it goes on nevertheless
        (begun / "groups.arrow").write_text("half")
    with pytest.raises(LedgerError, match="000003 exists"):
        write_record(tmp_path, first, EncodedGroups.of(payloads))
    assert read_record(tmp_path, 3)[0] == second
    assert os.listdir(tmp_path / "batches") == ["000003"]
