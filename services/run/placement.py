"""Assigns GPUs, cores and threads to the services of a local run. Imports no torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from tandem.rollout.engine import find_engine
from tandem.services.config import Recipe


def gpu_ids() -> tuple[str, ...]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; empty on a machine without GPUs."""
    present = [file for file in Path("/dev").glob("nvidia*") if file.name.removeprefix("nvidia").isdigit()]
    if not present:
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(index) for index in range(len(present)))
    return tuple(part.strip() for part in visible.split(",") if part.strip())


def gpus_wanted(recipe: Recipe) -> int:
    """GPUs that a local run uses: one in total with `ipc`, else one per trainer rank and one per sampler worker."""
    if recipe.weights.backend == "ipc":
        return 1
    return recipe.trainer.num_ranks + recipe.rollout.num_replicas * recipe.rollout.tensor_parallel_size


def place(recipe: Recipe, name: str) -> Mapping[str, str]:
    """Environment variables that assign GPUs or cores to the service `name` (feed, rollout-<replica>, reward, trainer).

    The trainer gets the first GPUs and the samplers the next ones. Without GPUs, each of several samplers gets its own
    core, unless the engine assigns cores itself. Keeps the user's values, except of CUDA_VISIBLE_DEVICES.
    """
    gpus = gpu_ids()
    wanted = (
        _gpu_environment(recipe, name, gpus)
        if gpus
        else _cpu_environment(recipe, name, sorted(os.sched_getaffinity(0)))
    )
    return {
        key: os.environ.get(key, value) if key != "CUDA_VISIBLE_DEVICES" else value for key, value in wanted.items()
    }


def starts_after(recipe: Recipe, name: str) -> str:
    """The service that has to be running before the service `name` starts; "" if it starts at once.

    Each service with a model needs about ten seconds of processor time for its imports. With fewer cores than such
    services, a simultaneous start would delay the first batch, so the first sampler starts before the others.
    """
    rollout = recipe.rollout
    num_busy = recipe.trainer.num_ranks + rollout.num_replicas * rollout.tensor_parallel_size
    service, replica = _split(name)
    first_alone = service == "rollout" and replica > 0 and len(os.sched_getaffinity(0)) < num_busy
    return "rollout-0" if first_alone else ""


def _gpu_environment(recipe: Recipe, name: str, gpus: tuple[str, ...]) -> dict[str, str]:
    service, replica = _split(name)
    width = recipe.rollout.tensor_parallel_size
    if service not in ("rollout", "trainer"):
        mine: tuple[str, ...] = ()
    elif recipe.weights.backend == "ipc" or len(gpus) == 1:
        mine = gpus[:1]
    elif service == "trainer":
        mine = gpus[: recipe.trainer.num_ranks]
    else:
        first = recipe.trainer.num_ranks + replica * width
        mine = gpus[first : first + width]
    return {"CUDA_VISIBLE_DEVICES": ",".join(mine)}


def _cpu_environment(recipe: Recipe, name: str, cores: list[int]) -> dict[str, str]:
    # One OpenMP thread per process: two slowed from 10 k to 1 k tokens/s under contention. A replay needs the same
    # number.
    environment = {"OMP_NUM_THREADS": "1"}
    service, replica = _split(name)
    width = recipe.rollout.tensor_parallel_size
    if service == "rollout" and recipe.rollout.num_replicas * width > 1:
        workers = range(replica * width, (replica + 1) * width)
        environment |= find_engine(recipe.rollout.engine).core_environment(
            [cores[worker % len(cores)] for worker in workers]
        )
    return environment


def _split(name: str) -> tuple[str, int]:
    service, _, replica = name.partition("-")
    return service, int(replica or 0)
