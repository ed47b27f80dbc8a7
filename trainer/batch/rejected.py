"""Groups that the trainer rejected, in `rejected/<version>` of the run folder, for those who look at the run.

A file is the group's payload; its name is `<group id>.<reason>`. The version is that of the batch that was being
filled. Nothing is trained or counted from these files: after a crash one may be missing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from tandem.trainer.checkpoints.durable import disk_full_error, make_folder, write_file

REJECTED_FOLDER = "rejected"
Rejection = Literal["stale", "zero_variance", "too_few_scored_rows", "no_scored_baseline", "unknown_version"]
"""Why the trainer drops a scored group."""


def rejected_folder(run_folder: Path, version: int) -> Path:
    """The folder of the groups that were rejected while the batch of `version` was filled."""
    return Path(run_folder) / REJECTED_FOLDER / f"{version:06d}"


def write_rejected(run_folder: Path, version: int, group_id: str, reason: Rejection, payload: bytes) -> None:
    """Keeps a rejected group. Raises EnvironmentLackError if the disk is full."""
    folder = rejected_folder(run_folder, version)
    with disk_full_error(folder):
        make_folder(folder)
        write_file(folder / f"{group_id}.{reason}", payload)


def read_rejected(run_folder: Path, version: int) -> Iterator[tuple[str, bytes]]:
    """The reason and the payload of each kept group, in order of their names."""
    for file in sorted(rejected_folder(run_folder, version).glob("[0-9]*.*")):
        try:
            payload = file.read_bytes()
        except FileNotFoundError:
            continue  # pruned since it was listed
        yield file.name.partition(".")[2], payload


def prune_rejected(run_folder: Path, last: int) -> None:
    """Deletes the groups that were rejected for the batches up to version `last`."""
    for folder in (Path(run_folder) / REJECTED_FOLDER).glob("[0-9]*"):
        if int(folder.name) <= last:
            shutil.rmtree(folder)
