"""Checkpoints: `checkpoints/<version>` holds a folder of the backend's files for each engine, the ranks' random states,
and `state.json`. The version is that of the last batch that the weights contain. Imports no torch.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

from tandem.protos.errors import DataError

STATE_FILE = "state.json"
FORMAT = 3


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


def list_checkpoints(checkpoints: Path) -> list[tuple[int, Path]]:
    """(version, folder) of every complete checkpoint inside the folder `checkpoints`, ascending."""
    entries = (entry for entry in checkpoints.glob("[0-9]*") if (entry / STATE_FILE).exists())
    return sorted((int(entry.name), entry) for entry in entries if entry.name.isdigit())


def latest_checkpoint(checkpoints: Path) -> tuple[int, Path] | None:
    """The newest complete checkpoint, or None."""
    return max(list_checkpoints(checkpoints), default=None)


def prune_checkpoints(checkpoints: Path, keep: int) -> None:
    """Deletes all but the newest `keep`."""
    for _, folder in list_checkpoints(checkpoints)[:-keep]:
        shutil.rmtree(folder)


def read_state(folder: Path) -> CheckpointState:
    """Reads `state.json`. Raises DataError if this is not a complete checkpoint of a known format."""
    try:
        values = json.loads((folder / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"checkpoint {folder} cannot be read: {error}") from error
    if values.pop("format") > FORMAT:
        raise DataError(f"checkpoint {folder} was written by a newer Tandem: update this one")
    return CheckpointState(**values)
