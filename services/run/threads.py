"""Compares numbers of threads with this machine's cores. More threads than cores are refused before a run begins. A run
that has begun keeps its numbers, on which the last bits of its results depend, and `tandem run` says what shares cores.
"""

from __future__ import annotations

from collections.abc import Mapping

from tandem.protos.errors import ConfigError
from tandem.services.config import Recipe, load_resolved
from tandem.services.run.folder import CONFIG_FILE, step_taken
from tandem.services.run.placement import gpu_ids, num_cores, workers_of


def check_threads(recipe: Recipe, service: str, num_workers: int) -> None:
    """Checks that this machine has a core for each thread of the trainer's ranks, or of the samplers' workers, that
    start here. One thread each is always accepted. Workers on GPUs hardly compute on cores, so each is compared alone.
    A run that has begun keeps its number.
    """
    number, config = getattr(recipe, service).num_threads, recipe.folder / CONFIG_FILE
    num_workers = 1 if gpu_ids() else num_workers
    if not _exceeds_cores(number, num_workers):
        return
    has_begun = config.is_file() and step_taken(recipe.folder)
    if not has_begun or getattr(load_resolved(config), service).num_threads != number:
        each = f" for each of {num_workers} workers," if num_workers > 1 else ""
        fault = f"{service}.num_threads is {number}{each} and this machine has {num_cores()} cores"
        raise ConfigError(f'{fault}: lower it, or set it to "auto"')


def shared_cores(recipe: Recipe) -> Mapping[str, str]:
    """What a run says whose threads share cores, because it has more samplers than when it began, or fewer cores: a
    line by service, for those that it concerns.
    """
    numbers = {service: getattr(recipe, service).num_threads for service in workers_of(recipe)}
    return {
        service: f"{service}.num_threads stays {numbers[service]}: "
        f"{numbers[service] * num_workers} threads share the {num_cores()} cores of this machine"
        for service, num_workers in workers_of(recipe).items()
        if not gpu_ids() and _exceeds_cores(numbers[service], num_workers)
    }


def _exceeds_cores(number: int | str, num_workers: int) -> bool:
    return isinstance(number, int) and number > 1 and number * num_workers > num_cores()
