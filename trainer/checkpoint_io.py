"""Writing checkpoints from a DeepSpeed engine, and loading them into one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from protos.errors import ConfigError, DataError
from trainer.checkpoint import FORMAT, STATE_FILE, CheckpointState, read_state
from trainer.durable import begin_folder, disk_full_named, finish_folder, partial_folder

_ENGINE_TAG = "engine"


def save_checkpoint(
    engine: Any, folder: Path, state: CheckpointState, *, rank: int, barrier: Callable[[], None]
) -> None:
    """Writes the checkpoint; all ranks enter. Returns once it is on disk under its name.

    Raises:
        EnvironmentLackError: the disk is full. Earlier checkpoints are untouched.
    """
    begun = partial_folder(folder)
    if rank == 0:
        begin_folder(folder)
    barrier()
    try:
        with disk_full_named(folder):
            engine.save_checkpoint(str(begun), tag=_ENGINE_TAG, save_latest=False)
            safetensors.torch.save_file(_random_states(), begun / _random_file(rank))
            barrier()
            if rank == 0:
                text = json.dumps({"format": FORMAT, **asdict(state)}, indent=2) + "\n"
                (begun / STATE_FILE).write_text(text, encoding="utf-8")
                finish_folder(folder)
    except BaseException:
        if rank == 0:
            shutil.rmtree(begun, ignore_errors=True)
        raise
    barrier()


def load_checkpoint(
    engine: Any, folder: Path, *, world_size: int, zero_stage: int, dtype: str, rank: int
) -> CheckpointState:
    """Brings the engine and the random states to what the checkpoint holds; all ranks enter.

    Raises:
        DataError: there is no finished checkpoint.
        ConfigError: it was written by another number of ranks, ZeRO stage or dtype.
    """
    state = read_state(folder)
    for name, setting, now in (
        ("world_size", "trainer.num_ranks × trainer.num_nodes", world_size),
        ("zero_stage", "trainer.zero_stage", zero_stage),
        ("dtype", "trainer.dtype", dtype),
    ):
        written = getattr(state, name)
        if written != now:
            raise ConfigError(
                f"checkpoint {folder} was written with {setting} = {written}, not {now}: resume with {written}"
            )
    # DeepSpeed's files are pickles: only a run's own checkpoints are loaded.
    path, _ = engine.load_checkpoint(str(folder), tag=_ENGINE_TAG)
    if path is None:
        raise DataError(
            f"checkpoint {folder} lacks DeepSpeed's files: remove the folder to resume from the one before it"
        )
    states = safetensors.torch.load_file(folder / _random_file(rank))
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    return state


def _random_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.safetensors"
