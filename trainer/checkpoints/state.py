"""Checkpoints: `checkpoints/<version>-<incarnation>` holds a folder of the backend's files for each engine, the ranks'
random states, and `state.json`. The version is that of the last batch that the weights contain, the incarnation that of
the trainer that wrote it, so that a trainer never writes into the checkpoint of another one. Imports no torch.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from tandem.protos.errors import DataError
from tandem.trainer.checkpoints.durable import PARTIAL, remove_folder

STATE_FILE = "state.json"
LOADING_FILE = "loading.lock"
"""File in the folder of checkpoints, locked by whoever loads one while another trainer may prune them."""
FORMAT = 4
_NAME = re.compile(r"([0-9]+)(?:-([0-9]+))?")  # checkpoints of format 3 name no incarnation


@dataclass(frozen=True, slots=True)
class CheckpointState:
    """The contents of `state.json`."""

    batch_version: int
    optimizer_step: int
    backend: str
    world_size: int
    zero_stage: int
    dtype: str
    trainer: dict[str, object]
    """The trainer's configuration, for information only; a resumed run uses its own."""
    trained_elements: dict[str, int]
    """Engine (`engine` is the policy's) → number of trained elements. Frozen weights (LoRA's base) are not in the
    checkpoint.
    """
    kl_coefficients: dict[str, float]
    """The current coefficients of the KL penalties."""
    incarnation: int = 0
    """Of the trainer that wrote it; 0 in format 3."""


def checkpoint_folder(checkpoints: Path, version: int, incarnation: int) -> Path:
    """The folder of a checkpoint inside the folder `checkpoints`."""
    return checkpoints / f"{version:06d}-{incarnation}"


def list_checkpoints(checkpoints: Path) -> list[tuple[int, int, Path]]:
    """(version, incarnation, folder) of every complete checkpoint inside the folder `checkpoints`, ascending.

    Every batch is recorded once, so two checkpoints of one version hold the same batches. The one of the later
    incarnation comes last.
    """
    return [one for one in _named(checkpoints) if (one[2] / STATE_FILE).exists()]


def incomplete_checkpoints(checkpoints: Path) -> list[tuple[int, int, Path]]:
    """As `list_checkpoints`, the folders without `state.json`. A trainer leaves none; a broken copy may."""
    return [one for one in _named(checkpoints) if not (one[2] / STATE_FILE).exists()]


def _named(checkpoints: Path) -> list[tuple[int, int, Path]]:
    names = ((_NAME.fullmatch(entry.name), entry) for entry in checkpoints.glob("[0-9]*"))
    return sorted((int(name[1]), int(name[2] or 0), entry) for name, entry in names if name)


def latest_checkpoint(checkpoints: Path) -> tuple[int, int, Path] | None:
    """The newest complete checkpoint, or None."""
    return max(list_checkpoints(checkpoints), default=None)


def prune_checkpoints(checkpoints: Path, keep: int) -> None:
    """Deletes what trainers that died or were replaced have begun, and all checkpoints but the newest `keep`; these
    only while nobody else loads one.
    """
    for begun in checkpoints.glob(f"*{PARTIAL}"):
        shutil.rmtree(begun, ignore_errors=True)
    if not _is_loading(checkpoints / LOADING_FILE):
        for _, _, folder in list_checkpoints(checkpoints)[:-keep]:
            remove_folder(folder)


def _is_loading(lock: Path) -> bool:
    """Whoever locks it now chooses the newest checkpoint, which is not deleted."""
    if not lock.exists():
        return False
    with lock.open("r+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def read_state(folder: Path) -> CheckpointState:
    """Reads `state.json`. Raises DataError if this is not a complete checkpoint of a known format."""
    try:
        values = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
        is_newer = values.pop("format") > FORMAT
        state = None if is_newer else CheckpointState(**values)
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "copy it again, or remove it to go on from an earlier one"
        raise DataError(f"checkpoint {folder} cannot be read ({error!r}); {remedy}") from error
    if state is None:
        raise DataError(f"checkpoint {folder} was written by a newer Tandem: update this one")
    return state
