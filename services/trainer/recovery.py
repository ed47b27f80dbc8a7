"""Trainer start: a new incarnation, the last checkpoint, and the batches recorded after it.

The checkpoint on disk is authoritative and the ledger is set to match it: batches in the checkpoint are committed,
batches recorded after it are retrained in their recorded order and plan, and groups that were claimed without a record
become claimable again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tandem.protos.errors import ConfigError, DeadlineError, LedgerError
from tandem.protos.types import TrainBatch
from tandem.services.buffer.buffer import Buffer
from tandem.services.process import lock_file
from tandem.trainer.batch.record import read_plan, recorded_versions
from tandem.trainer.checkpoints.state import latest_checkpoint, list_checkpoints

CHECKPOINTS_FOLDER = "checkpoints"
_LOCK_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """The starting point of a new incarnation: the checkpoint's folder ("" for the initial model, version 0) and the
    recorded batches to retrain.
    """

    checkpoint: str
    checkpoint_version: int
    recorded: Sequence[int]

    @property
    def last_version(self) -> int:
        """The version after the recorded batches are retrained."""
        return self.recorded[-1] if self.recorded else self.checkpoint_version


def find_resume_point(folder: Path) -> ResumePoint:
    """The resume point in the run folder. Raises LedgerError if a record before the last recorded batch is missing."""
    checkpoint = latest_checkpoint(folder / CHECKPOINTS_FOLDER)
    version, path = (0, "") if checkpoint is None else (checkpoint[0], str(checkpoint[2]))
    recorded = [number for number in recorded_versions(folder) if number > version]
    expected = range(version + 1, version + 1 + len(recorded))
    if recorded != list(expected):
        gap = min(set(expected) - set(recorded))
        raise LedgerError(
            f"{folder}/batches/{gap:06d} is missing, but a later batch is recorded and the last checkpoint holds "
            f"version {version}; restore that folder, or start a new run"
        )
    return ResumePoint(path, version, recorded)


def highest_incarnation(folder: Path) -> int:
    """The highest incarnation that has written a checkpoint or the last batch of the run folder; 0 if there is none."""
    written = [incarnation for _, incarnation, _ in list_checkpoints(folder / CHECKPOINTS_FOLDER)]
    if recorded := recorded_versions(folder):
        written.append(read_plan(folder, recorded[-1]).incarnation)
    return max(written, default=0)


def take_over(buffer: Buffer, folder: Path) -> tuple[int, ResumePoint]:
    """Begins a new incarnation, which fences every earlier one, and sets the ledger to match the run folder."""
    incarnation = buffer.begin_incarnation(highest_incarnation(folder))
    resume_point = find_resume_point(folder)
    # A Redis that lost its last writes has committed less than the checkpoint contains. The groups of those batches
    # must not be trained twice, so the rollback needs their records, too.
    known = min(buffer.committed_version(), resume_point.checkpoint_version)
    versions = [version for version in recorded_versions(folder) if version > known]
    if missing := set(range(known + 1, resume_point.checkpoint_version + 1)).difference(versions):
        raise LedgerError(
            f"Redis at {buffer.place} has committed version {known} and the last checkpoint holds version "
            f"{resume_point.checkpoint_version}, but {folder}/batches/{min(missing):06d} is missing; restore that "
            "folder, or start a new run"
        )
    recorded = {version: read_plan(folder, version).group_ids for version in versions}
    buffer.rollback(incarnation, resume_point.checkpoint_version, recorded)
    return incarnation, resume_point


def check_world_size(batch: TrainBatch, world_size: int) -> None:
    """Raises ConfigError, with the number of ranks to use, if a recorded plan needs more ranks than there are."""
    needed = 1 + max((row.rank for row in batch.plan), default=0)
    if needed > world_size:
        raise ConfigError(
            f"batch {batch.policy_version} was recorded by {needed} trainer ranks and cannot be trained again by "
            f"{world_size}: resume with trainer.num_ranks={needed}"
        )


def trainer_lock(folder: Path) -> IO[str]:
    """A file lock that ensures one trainer per run folder. It ends when the file is closed or the process ends.

    The incarnation in Redis fences every step. This lock also prevents a predecessor that is still shutting down from
    writing a record. Raises DeadlineError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / "trainer.lock").open("w")
    if lock_file(file, _LOCK_SECONDS):
        return file
    file.close()
    raise DeadlineError(f"another trainer has held {file.name} for {_LOCK_SECONDS:.0f} s")
