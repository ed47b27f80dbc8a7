"""Saves training engines to checkpoints and restores them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

import safetensors.torch
import torch

from tandem.protos.errors import ConfigError
from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.checkpoints.durable import begin_folder, disk_full_error, finish_folder, partial_folder
from tandem.trainer.checkpoints.state import FORMAT, STATE_FILE, CheckpointState, read_state

_POLICY = "engine"


def save_checkpoint(
    engines: Mapping[str, TrainingEngine],
    folder: Path,
    state: CheckpointState,
    *,
    rank: int,
    barrier: Callable[[], None],
) -> None:
    """Writes the checkpoint and returns when it is on disk. All ranks must call it.

    `engines`: the policy's as `engine`, and others (`critic`), each in a folder of that name. Frozen parameters are
    left out.

    Raises:
        EnvironmentLackError: the disk is full. Earlier checkpoints are untouched.
    """
    state = replace(state, trained_elements={name: each.num_trained for name, each in engines.items()})
    begun = partial_folder(folder)
    if rank == 0:
        begin_folder(folder)
    barrier()
    try:
        with disk_full_error(folder):
            for name, each in engines.items():
                each.save(begun / name)
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
    engines: Mapping[str, TrainingEngine],
    folder: Path,
    *,
    backend: str,
    world_size: int,
    zero_stage: int,
    dtype: str,
    rank: int,
) -> CheckpointState:
    """Restores the engines and the random states. All ranks must call it.

    Raises:
        DataError: there is no complete checkpoint.
        ConfigError: it was written by another backend, number of ranks, ZeRO stage or dtype, for other engines, or for
            other trained weights.
    """
    state = read_state(folder)
    for name, setting, now in (
        ("backend", "trainer.backend", backend),
        ("world_size", "trainer.num_ranks × trainer.num_nodes", world_size),
        ("zero_stage", "trainer.zero_stage", zero_stage),
        ("dtype", "trainer.dtype", dtype),
    ):
        written = getattr(state, name)
        if written != now:
            raise ConfigError(
                f"checkpoint {folder} was written with {setting} = {written}, not {now}: resume with {written}"
            )
    _check_engines(folder, state, engines)
    for name, each in engines.items():
        each.load(folder / name)
    states = safetensors.torch.load_file(folder / _random_file(rank))
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    return state


def _check_engines(folder: Path, state: CheckpointState, engines: Mapping[str, TrainingEngine]) -> None:
    written = state.trained_elements
    if not written:  # format 1: only the policy, without frozen parameters
        written = {_POLICY: engines[_POLICY].num_elements}
    if written.keys() != engines.keys():
        raise ConfigError(
            f"checkpoint {folder} holds {_names(written)}, this run trains "
            f"{_names(engines)}: resume with the same recipe"
        )
    for name, each in engines.items():
        if written[name] != each.num_trained:
            raise ConfigError(
                f"checkpoint {folder} holds {written[name]} trained weights of "
                f"{_names([name])}, this run trains {each.num_trained}: "
                "resume with the same model and the same LoRA settings"
            )


def _names(engines: Iterable[str]) -> str:
    return " and ".join("the policy" if name == _POLICY else f"the {name}" for name in engines)


def _random_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.safetensors"
