"""How a trainer begins: a new incarnation, the last checkpoint, and the recorded batches that came after it.

The checkpoint on disk is the truth. The ledger follows it: what the checkpoint contains is committed, the batches
recorded after it are trained again in their recorded order and plan, and groups that were claimed without a record wait
again.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tandem.protos.errors import ConfigError, DeadlineError, LedgerError
from tandem.protos.types import TrainBatch
from tandem.services.buffer.buffer import Buffer
from tandem.trainer.batch.record import record_group_ids, recorded_versions
from tandem.trainer.checkpoints.state import latest_checkpoint

CHECKPOINTS_FOLDER = "checkpoints"
_LOCK_FILE = "trainer.lock"
_LOCK_SECONDS = 30.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a new incarnation starts: the checkpoint's folder ("" for the initial model, version 0) and the batches to
    train again.
    """

    checkpoint: str
    checkpoint_version: int
    recorded: tuple[int, ...]

    @property
    def last_version(self) -> int:
        """The version that exists once the recorded batches are trained again."""
        return self.recorded[-1] if self.recorded else self.checkpoint_version

    def to_json(self) -> dict[str, Any]:
        """As a value that rank 0 can send to the others."""
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> ResumePoint:
        """The resume_point of `to_json`'s value."""
        return ResumePoint(values["checkpoint"], values["checkpoint_version"], tuple(values["recorded"]))


def find_resume_point(folder: Path) -> ResumePoint:
    """What the run folder holds.

    Raises:
        LedgerError: a record between the checkpoint and the last recorded batch is missing.
    """
    checkpoint = latest_checkpoint(folder / CHECKPOINTS_FOLDER)
    version, path = (0, "") if checkpoint is None else (checkpoint[0], str(checkpoint[1]))
    recorded = tuple(number for number in recorded_versions(folder) if number > version)
    expected = tuple(range(version + 1, version + 1 + len(recorded)))
    if recorded != expected:
        gap = min(set(expected) - set(recorded))
        raise LedgerError(
            f"{folder}/batches/{gap:06d} is missing, but a later batch is recorded "
            f"and the last checkpoint holds version {version}; "
            "restore that folder, or start a new run"
        )
    return ResumePoint(path, version, recorded)


def take_over(buffer: Buffer, folder: Path) -> tuple[int, ResumePoint]:
    """Begins a new incarnation and brings the ledger to what the run folder holds. Every earlier incarnation is fenced
    from here on.
    """
    incarnation = buffer.begin_incarnation()
    resume_point = find_resume_point(folder)
    # Those the checkpoint contains are given, too: should Redis have lost writes, their groups must not enter twice.
    recorded = {version: record_group_ids(folder, version) for version in recorded_versions(folder)}
    buffer.rollback(incarnation, resume_point.checkpoint_version, recorded)
    return incarnation, resume_point


def check_world_size(batch: TrainBatch, world_size: int) -> None:
    """Refuses a recorded plan made for more ranks than there are (fewer would give other weights, more of them cannot
    be run).

    Raises:
        ConfigError: with the number of ranks to use.
    """
    needed = 1 + max((row.rank for row in batch.plan), default=0)
    if needed > world_size:
        raise ConfigError(
            f"batch {batch.policy_version} was recorded by {needed} trainer ranks "
            f"and cannot be trained again by {world_size}: "
            f"resume with trainer.num_ranks={needed}"
        )


class TrainerLock:
    """Held by the one trainer of a run folder until its process ends, however it ends.

    The incarnation in Redis fences every step; this lock also keeps a predecessor that is still dying from writing a
    record.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._file = (folder / _LOCK_FILE).open("w")
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > deadline:
                    self._file.close()
                    raise DeadlineError(
                        f"another trainer has held {folder / _LOCK_FILE} for {_LOCK_SECONDS:.0f} s"
                    ) from None
                time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """Lets the next trainer in."""
        self._file.close()
