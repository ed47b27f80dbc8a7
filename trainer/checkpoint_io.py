"""Writing checkpoints from DeepSpeed engines, and loading them into these."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from tandem.protos.errors import ConfigError, DataError
from tandem.trainer.checkpoint import FORMAT, STATE_FILE, CheckpointState, read_state
from tandem.trainer.durable import begin_folder, disk_full_named, finish_folder, partial_folder

_POLICY = "engine"
_NO_ENGINES: Mapping[str, Any] = {}


def save_checkpoint(
    engine: Any,
    folder: Path,
    state: CheckpointState,
    *,
    rank: int,
    barrier: Callable[[], None],
    beside: Mapping[str, Any] = _NO_ENGINES,
) -> None:
    """Writes the checkpoint; all ranks enter. Returns once it is on disk under its name.

    `beside`: further engines by name (`critic`), each in a folder of its own beside the policy's. Frozen parameters are
    left out.

    Raises:
        EnvironmentLackError: the disk is full. Earlier checkpoints are untouched.
    """
    engines = {_POLICY: engine, **beside}
    state = replace(state, trained_elements={name: _trained_elements(each) for name, each in engines.items()})
    begun = partial_folder(folder)
    if rank == 0:
        begin_folder(folder)
    barrier()
    try:
        with disk_full_named(folder):
            for name, each in engines.items():
                each.save_checkpoint(
                    str(begun), tag=name, save_latest=False, exclude_frozen_parameters=_has_frozen(each)
                )
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
    engine: Any,
    folder: Path,
    *,
    world_size: int,
    zero_stage: int,
    dtype: str,
    rank: int,
    beside: Mapping[str, Any] = _NO_ENGINES,
) -> CheckpointState:
    """Brings the engines and the random states to what the checkpoint holds; all ranks enter.

    Raises:
        DataError: there is no finished checkpoint.
        ConfigError: it was written by another number of ranks, ZeRO stage or dtype, for other engines, or for other
            trained weights.
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
    engines = {_POLICY: engine, **beside}
    _check_engines(folder, state, engines)
    for name, each in engines.items():
        # DeepSpeed's files are pickles: only a run's own checkpoints are loaded.
        path, _ = each.load_checkpoint(str(folder), tag=name, load_module_strict=not _has_frozen(each))
        if path is None:
            raise DataError(
                f"checkpoint {folder} lacks DeepSpeed's files: remove the folder to resume from the one before it"
            )
    states = safetensors.torch.load_file(folder / _random_file(rank))
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
    return state


def _check_engines(folder: Path, state: CheckpointState, engines: Mapping[str, Any]) -> None:
    written = state.trained_elements
    if not written:  # format 1: the policy alone, all of it trained
        written = {_POLICY: sum(_num_elements(p) for p in engines[_POLICY].module.parameters())}
    if written.keys() != engines.keys():
        raise ConfigError(
            f"checkpoint {folder} holds {_names(written)}, this run trains "
            f"{_names(engines)}: resume with the same recipe"
        )
    for name, each in engines.items():
        now = _trained_elements(each)
        if written[name] != now:
            raise ConfigError(
                f"checkpoint {folder} holds {written[name]} trained weights of "
                f"{_names([name])}, this run trains {now}: "
                "resume with the same model and the same LoRA settings"
            )


def _names(engines: Iterable[str]) -> str:
    return " and ".join("the policy" if name == _POLICY else f"the {name}" for name in engines)


def _trained_elements(engine: Any) -> int:
    return sum(_num_elements(parameter) for parameter in engine.module.parameters() if parameter.requires_grad)


def _num_elements(parameter: torch.nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _has_frozen(engine: Any) -> bool:
    return not all(parameter.requires_grad for parameter in engine.module.parameters())


def _random_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _random_file(rank: int) -> str:
    return f"random-{rank:05d}.safetensors"
