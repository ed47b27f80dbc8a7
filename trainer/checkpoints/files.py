"""Saves training engines to checkpoints and restores them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path

import safetensors.torch
import torch

from tandem.protos.errors import ConfigError
from tandem.trainer.backend.base import TrainingEngine
from tandem.trainer.checkpoints.durable import atomic_folder, disk_full_error, partial_folder
from tandem.trainer.checkpoints.state import FORMAT, STATE_FILE, CheckpointState, read_state
from tandem.trainer.config import TrainerConfig
from tandem.trainer.rank import Rank

_POLICY = "engine"


def save_checkpoint(
    engines: Mapping[str, TrainingEngine],
    folder: Path,
    config: TrainerConfig,
    ranks: Rank,
    *,
    batch_version: int,
    incarnation: int,
    optimizer_step: int,
    kl_coefficients: Mapping[str, float],
    check: Callable[[], None] = lambda: None,
) -> None:
    """Writes the checkpoint and returns when it is on disk. All ranks must call it.

    `engines`: the policy's as `engine`, and others (`critic`), each in a folder of that name. Frozen parameters are
    left out. `check` raises on rank 0 if another trainer took over: before anything is written, and before the
    checkpoint gets its name. Raises EnvironmentLackError if the disk is full. Earlier checkpoints are untouched.
    """
    if ranks.rank == 0:
        check()
    state = CheckpointState(
        batch_version=batch_version,
        incarnation=incarnation,
        optimizer_step=optimizer_step,
        backend=config.backend,
        world_size=ranks.world_size,
        zero_stage=config.resolved_zero_stage,
        dtype=config.dtype,
        trainer=config.model_dump(mode="json"),
        trained_elements={name: engine.num_trained for name, engine in engines.items()},
        kl_coefficients=dict(kl_coefficients),
    )
    begun = partial_folder(folder)
    with atomic_folder(folder, before_rename=check) if ranks.rank == 0 else disk_full_error(folder):
        ranks.barrier()
        for name, engine in engines.items():
            engine.save(begun / name)
        safetensors.torch.save_file(_random_states(), begun / _random_file(ranks.rank))
        ranks.barrier()
        if ranks.rank == 0:
            text = json.dumps({"format": FORMAT, **asdict(state)}, indent=2) + "\n"
            (begun / STATE_FILE).write_text(text, encoding="utf-8")
    ranks.barrier()


def load_checkpoint(
    engines: Mapping[str, TrainingEngine], folder: Path, config: TrainerConfig, ranks: Rank
) -> CheckpointState:
    """Restores the engines and the random states. All ranks must call it. Raises DataError if there is no complete
    checkpoint, and ConfigError if it was written by another backend, number of ranks, ZeRO stage or dtype, for other
    engines, or for other trained weights.
    """
    state = read_state(folder)
    for setting, written, now in (
        ("trainer.backend", state.backend, config.backend),
        ("trainer.num_ranks × trainer.num_nodes", state.world_size, ranks.world_size),
        ("trainer.zero_stage", state.zero_stage, config.resolved_zero_stage),
        ("trainer.dtype", state.dtype, config.dtype),
    ):
        if written != now:
            raise ConfigError(
                f"checkpoint {folder} was written with {setting} = {written}, not {now}: resume with {written}"
            )
    _check_engines(folder, state, engines)
    for name, engine in engines.items():
        engine.load(folder / name)
    states = safetensors.torch.load_file(folder / _random_file(ranks.rank))
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    return state


def _check_engines(folder: Path, state: CheckpointState, engines: Mapping[str, TrainingEngine]) -> None:
    written = state.trained_elements
    if written.keys() != engines.keys():
        raise ConfigError(
            f"checkpoint {folder} holds {_names(written)}, this run trains "
            f"{_names(engines)}: resume with the same recipe"
        )
    for name, engine in engines.items():
        if written[name] != engine.num_trained:
            raise ConfigError(
                f"checkpoint {folder} holds {written[name]} trained weights of {_names([name])}, this run trains "
                f"{engine.num_trained}: resume with the same model and the same LoRA settings"
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
