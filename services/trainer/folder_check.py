"""Compares a run's ledger with its run folder, as `tandem ledger --verify` and `tandem repair` do. Changes nothing.

The ledger is read first. What it has as recorded was on disk before, so the comparison holds while the run goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tandem.protos.errors import DataError, TandemError
from tandem.services.buffer.buffer import Buffer
from tandem.services.buffer.history import finished_groups, trained_groups
from tandem.services.buffer.rollback import check_records, recorded_version
from tandem.services.trainer.recovery import CHECKPOINTS_FOLDER, find_resume_point, read_records
from tandem.trainer.batch.record import BATCHES_FOLDER, read_plan, read_record, recorded_versions
from tandem.trainer.checkpoints.state import STATE_FILE, incomplete_checkpoints, latest_checkpoint, read_state


@dataclass(slots=True)
class Comparison:
    """What differs between the ledger and the run folder."""

    violations: list[str] = field(default_factory=list)
    """One line each."""
    mended: list[str] = field(default_factory=list)
    """Those of the violations that the rollback of the next trainer ends."""
    notes: list[str] = field(default_factory=list)
    """What is no violation: what is on disk and not yet in the ledger, what is not compared, what no trainer reads."""
    can_train: bool = True
    """Whether a trainer can go on with the run."""
    needs_rollback: bool = False
    """Whether the rollback of the next trainer ends violations, or enters batches that the ledger does not have yet."""

    def forbid(self, error: TandemError) -> None:
        """Notes what a trainer that starts would raise."""
        self.can_train = False
        if str(error) not in self.violations:
            self.violations.append(str(error))


def compare_with_folder(buffer: Buffer, folder: Path) -> Comparison:
    """Compares every group that the ledger has as trained or committed with the records of batches, and both with the
    checkpoints. Reads every plan, and every record that the next trainer trains again.
    """
    known, committed_version = recorded_version(buffer.connection), buffer.committed_version()
    trained, committed = trained_groups(buffer.connection), finished_groups(buffer.connection).get("committed", set())
    found = Comparison()
    checkpoint_version = _refusals(found, buffer, folder, known)
    rolled_back_to = min(committed_version, checkpoint_version)
    records = _read_plans(found, folder)
    for version, group_ids in records.items():
        others = [one for one in group_ids if trained.get(one) != version and one not in committed]
        if version > known:
            found.notes.append(f"{BATCHES_FOLDER}/{version:06d} is not in the ledger yet: the trainer enters it")
        else:
            text = f"{{}} recorded in version {version}, and the ledger has {{}} neither as trained in it nor committed"
            lines = list(_some(others, text))
            found.violations += lines
            found.mended += lines if version > rolled_back_to else []
    if found.can_train:  # else a trainer's own check has named it
        _check_trained(found, records, trained)
    first = min(records, default=1)
    if first > 1:
        found.notes.append(f"the records before version {first} were removed: their groups are not compared")
    else:
        missing = committed.difference(*records.values())
        found.violations += _some(missing, f"{{}} committed, and no record in {BATCHES_FOLDER}/ holds {{}}")
    if committed_version > checkpoint_version:
        words = f"the ledger has version {committed_version} as committed"
        found.mended.append(f"{words}, and the last checkpoint holds version {checkpoint_version}")
        found.violations.append(found.mended[-1])
    found.needs_rollback = bool(found.mended) or any(version > known for version in records)
    return found


def _refusals(found: Comparison, buffer: Buffer, folder: Path, known: int) -> int:
    """Adds what a trainer that starts would refuse. Returns the version of the last checkpoint."""
    latest = latest_checkpoint(folder / CHECKPOINTS_FOLDER)
    last = 0 if latest is None else latest[0]
    for version, _, incomplete in incomplete_checkpoints(folder / CHECKPOINTS_FOLDER):
        if version <= last:
            words = f"{incomplete} has no {STATE_FILE}, so it is not complete and no trainer reads it"
            found.notes.append(f"{words}: remove it, or copy it again")
    try:
        resume_point = find_resume_point(folder)
    except TandemError as error:
        found.forbid(error)
        return last
    version = resume_point.checkpoint_version
    try:
        if resume_point.checkpoint:
            read_state(Path(resume_point.checkpoint))
        check_records(buffer.connection, version, read_records(buffer, folder, version), known)
        for recorded in resume_point.recorded:
            read_record(folder, recorded)
    except TandemError as error:
        found.forbid(error)
    return version


def _read_plans(found: Comparison, folder: Path) -> dict[int, Sequence[str]]:
    """The group ids of every record; none of those that cannot be read."""
    records: dict[int, Sequence[str]] = {}
    version_of: dict[str, int] = {}
    for version in recorded_versions(folder):
        try:
            records[version] = read_plan(folder, version).group_ids
        except DataError as error:
            if version not in recorded_versions(folder):  # removed meanwhile by a running trainer
                continue
            found.violations += [str(error)] if str(error) not in found.violations else []
            records[version] = ()
        for group_id in records[version]:
            before = version_of.setdefault(group_id, version)
            if before != version:
                found.can_train = False  # it would train the group twice
                found.violations.append(f"group {group_id} is recorded in versions {before} and {version}")
    return records


def _check_trained(found: Comparison, records: Mapping[int, Sequence[str]], trained: Mapping[str, int]) -> None:
    without: dict[int, list[str]] = {}
    for group_id, version in trained.items():
        if group_id not in records.get(version, ()):
            without.setdefault(version, []).append(group_id)
    for version, group_ids in sorted(without.items()):
        found.violations += _some(group_ids, f"{{}} trained in version {version}, and its record does not hold {{}}")


def _some(group_ids: Collection[str], text: str) -> Iterator[str]:
    """One line about groups, if there are any. The text has places for `group 0-1 is` and `it`, or their plurals."""
    names = sorted(group_ids)
    if len(names) == 1:
        yield text.format(f"group {names[0]} is", "it")
    elif names:
        yield text.format(f"{len(names)} groups (the first is {names[0]}) are", "them")
