"""Where a trainer starts: the last checkpoint, and the batches recorded after it.

The checkpoint on disk is authoritative and the ledger is set to match it: batches in the checkpoint are committed,
batches recorded after it are retrained in their recorded order and plan, and groups that were claimed without a record
become claimable again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from tandem.protos.errors import ConfigError, DeadlineError, LedgerError, RunExistsError, RunFolderError
from tandem.protos.types import TrainBatch
from tandem.services.buffer.buffer import Buffer
from tandem.services.config import Recipe
from tandem.services.process import lock_file
from tandem.services.run.folder import write_text
from tandem.trainer.batch.record import read_plan, recorded_versions
from tandem.trainer.checkpoints.state import (
    STATE_FILE,
    incomplete_checkpoints,
    latest_checkpoint,
    list_checkpoints,
)

CHECKPOINTS_FOLDER = "checkpoints"
INCARNATION_FILE = "incarnation"
LOCK_FILE = "trainer.lock"
STOPPING = "stops"
"""What a trainer that was told to stop reports as its activity."""
_LOCK_SECONDS = 30.0
_HEARTBEAT_WAIT_SECONDS = 3.0  # one is sent each second
_HEARTBEAT_POLL_SECONDS = 0.2


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
    """The resume point in the run folder. Raises LedgerError if a record before the last recorded batch is missing,
    RunFolderError if a checkpoint that would be the last one is not complete.
    """
    checkpoint = latest_checkpoint(folder / CHECKPOINTS_FOLDER)
    version, path = (0, "") if checkpoint is None else (checkpoint[0], str(checkpoint[2]))
    for later, _, incomplete in incomplete_checkpoints(folder / CHECKPOINTS_FOLDER):
        if later > version:
            raise RunFolderError(
                f"checkpoint {incomplete} has no {STATE_FILE}, so it is not complete: copy it again, or remove it to "
                f"go on from version {version}"
            )
    recorded = [number for number in recorded_versions(folder) if number > version]
    expected = range(version + 1, version + 1 + len(recorded))
    if recorded != list(expected):
        gap = min(set(expected) - set(recorded))
        raise LedgerError(
            f"{folder}/batches/{gap:06d} is missing, but a later batch is recorded and the last checkpoint holds "
            f"version {version}; restore that folder, or start a new run"
        )
    return ResumePoint(path, version, recorded)


def read_records(buffer: Buffer, folder: Path, checkpoint_version: int) -> dict[int, Sequence[str]]:
    """The group ids of the recorded batches that a rollback to the checkpoint needs. Raises LedgerError if one is
    missing.
    """
    # A Redis that lost its last writes has committed less than the checkpoint contains. The groups of those batches
    # must not be trained twice, so the rollback needs their records, too.
    known = min(buffer.committed_version(), checkpoint_version)
    versions = [version for version in recorded_versions(folder) if version > known]
    if missing := set(range(known + 1, checkpoint_version + 1)).difference(versions):
        raise LedgerError(
            f"Redis at {buffer.place} has committed version {known} and the last checkpoint holds version "
            f"{checkpoint_version}, but {folder}/batches/{min(missing):06d} is missing; restore that folder, or start "
            "a new run"
        )
    return {version: read_plan(folder, version).group_ids for version in versions}


def begin_incarnation(buffer: Buffer, folder: Path) -> int:
    """Begins a new incarnation, which fences every earlier one. Its number is on disk before it is used, because
    samplers refuse the weights of a lower number than they have seen, and Redis may forget the number.

    Raises EnvironmentLackError if the run folder cannot be written.
    """
    before = highest_incarnation(folder)
    write_text(folder / INCARNATION_FILE, f"{before}\n")  # whoever cannot write it may not fence another trainer
    incarnation = buffer.begin_incarnation(before)
    write_text(folder / INCARNATION_FILE, f"{max(incarnation, highest_incarnation(folder))}\n")
    return incarnation


def highest_incarnation(folder: Path) -> int:
    """The highest incarnation that has begun in the run folder, or written a checkpoint or its last batch; 0 if there
    is none. Raises RunFolderError if the file that holds it is damaged.
    """
    written = [incarnation for _, incarnation, _ in list_checkpoints(folder / CHECKPOINTS_FOLDER)]
    if recorded := recorded_versions(folder):
        written.append(read_plan(folder, recorded[-1]).incarnation)
    file = folder / INCARNATION_FILE
    if file.exists():
        text = file.read_text(errors="replace").strip()
        if not text.isdecimal():
            raise RunFolderError(f"{file} holds {text[:40]!r} instead of a number; remove it if no trainer works here")
        written.append(int(text))
    return max(written, default=0)


def check_complete(counts: Mapping[str, int], folder: Path, version: int, groups_per_batch: int) -> None:
    """Checks at the end of a run that the folder holds every batch that the ledger has as trained. Raises
    RunFolderError if not.
    """
    recorded = recorded_versions(folder)
    if missing := set(range(min(recorded, default=1), version + 1)).difference(recorded):
        raise RunFolderError(
            f"{folder}/batches/{min(missing):06d} is missing at the end of the run, so it cannot be trained again: "
            "restore that folder, or start a new run"
        )
    trained = counts["trained"] + counts["committed"]
    if trained > version * groups_per_batch:
        raise RunFolderError(
            f"the run's ledger has {trained} groups as trained, but the {version} batches in {folder} hold at most "
            f"{version * groups_per_batch}: the weights lack what was trained in another run folder; start a new run"
        )


def check_world_size(batch: TrainBatch, world_size: int) -> None:
    """Raises ConfigError, with the number of ranks to use, if a recorded plan needs more ranks than there are."""
    needed = 1 + max((row.rank for row in batch.plan), default=0)
    if needed > world_size:
        raise ConfigError(
            f"batch {batch.policy_version} was recorded by {needed} trainer ranks and cannot be trained again by "
            f"{world_size}: resume with trainer.num_ranks={needed}"
        )


def check_no_trainer_works(recipe: Recipe, redis_url: str) -> None:
    """Raises RunExistsError if the trainer that holds the lock of the run folder sends heartbeats and does not stop.

    This is known before a model is loaded. For one that is silent or stops, `trainer_lock` waits.
    """
    file, asked_at = recipe.folder / LOCK_FILE, time.monotonic()
    deadline = asked_at + _HEARTBEAT_WAIT_SECONDS
    if not file.exists():
        return
    with file.open("a") as lock:
        if lock_file(lock):
            return
        with closing(Buffer(redis_url, recipe.run.run_id)) as buffer:
            while time.monotonic() < deadline and not lock_file(lock, _HEARTBEAT_POLL_SECONDS):
                silence = buffer.silences().get("trainer", math.inf)
                if silence < time.monotonic() - asked_at and buffer.activities().get("trainer") != STOPPING:
                    remedy = "stop that one first, or choose another run.folder"
                    raise RunExistsError(f"run folder {recipe.folder}: a trainer works in it; {remedy}")


def trainer_lock(folder: Path, seconds: float | None = None) -> IO[str]:
    """A file lock that ensures one trainer per run folder. It ends when the file is closed or the process ends.

    The incarnation in Redis fences every step. This lock also prevents a predecessor that is still shutting down from
    writing a record. Raises DeadlineError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / LOCK_FILE).open("w")
    patience = _LOCK_SECONDS if seconds is None else seconds
    if lock_file(file, patience):
        return file
    file.close()
    raise DeadlineError(f"another trainer has held {file.name} for {patience:.0f} s")
