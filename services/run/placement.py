"""What this machine has, and which GPUs, cores and threads each service of a local run gets. Imports no torch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

from tandem.rollout.engine import find_engine
from tandem.services.config import Recipe

CPU_ENVIRONMENT: Mapping[str, str] = {
    "OMP_NUM_THREADS": "1",
    # Threads that wait sleep. Otherwise those of sampler and trainer keep one another from the cores: two threads on
    # two busy cores sampled a tenth of the tokens of one thread.
    "OMP_WAIT_POLICY": "PASSIVE",
    # glibc keeps this much freed memory for the next tensors. Otherwise every step returns its memory to the system
    # and gets it back page by page, which takes a fifth of the time of a small model's step.
    "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    # Huge pages for that memory, where the system gives them to those who ask: 2 % less processor time in the demo
    # (benchmarks/step_cpu.py).
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}
"""Environment of services that compute on CPUs."""
ONE_ARENA: Mapping[str, str] = {"MALLOC_ARENA_MAX": "1"}
"""Samplers have this as well: all threads of an engine take memory from one place. Otherwise the thread that loads a
version and those that sample each keep what another one has freed (benchmarks/sampler_memory.py)."""
_MALLOPT = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_MMAP_THRESHOLD_": -3, "MALLOC_ARENA_MAX": -8}
"""Numbers of these settings in glibc's malloc.h."""
NARROW = 256
"""A model with a smaller hidden size trains with one thread: its operations are so short that a second one takes more
processor time than it saves (benchmarks/threads.py)."""


def gpu_ids() -> tuple[str, ...]:
    """The GPUs this process may use, as CUDA_VISIBLE_DEVICES names them; empty on a machine without GPUs."""
    present = [file for file in Path("/dev").glob("nvidia*") if file.name.removeprefix("nvidia").isdigit()]
    if not present:
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return tuple(str(index) for index in range(len(present)))
    return tuple(part.strip() for part in visible.split(",") if part.strip())


def free_memory_bytes() -> float:
    """Memory this process can still allocate: the machine's free memory, or the rest of the cgroup's limit if lower."""
    import psutil

    free = float(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit = (group / "memory.max").read_text().strip()
        used = float((group / "memory.current").read_text())
        reclaimable = sum(
            float(line.split()[1])
            for line in (group / "memory.stat").read_text().splitlines()
            if line.startswith("inactive_file ")
        )
    except OSError:
        return free
    return free if limit == "max" else min(free, float(limit) - used + reclaimable)


def gpus_wanted(recipe: Recipe) -> int:
    """GPUs that a local run uses: one in total with `ipc`, else one per trainer rank and one per sampler worker."""
    if recipe.weights.backend == "ipc":
        return 1
    return recipe.trainer.num_ranks + recipe.rollout.num_replicas * recipe.rollout.tensor_parallel_size


def place(recipe: Recipe, name: str) -> Mapping[str, str]:
    """Environment variables that assign GPUs or cores to the service `name` (feed, rollout-<replica>, reward, trainer).

    The trainer gets the first GPUs and the samplers the next ones. Without GPUs see `place_on_cores`.
    """
    if gpus := gpu_ids():
        return {"CUDA_VISIBLE_DEVICES": ",".join(_gpus_of(recipe, name, gpus))}
    return place_on_cores(recipe, name)


def place_on_cores(recipe: Recipe, name: str) -> Mapping[str, str]:
    """Environment variables that assign cores to a service without a GPU. Each of several samplers gets its own core,
    unless the engine assigns cores itself. The user's values of these variables are kept, but for trainer and samplers
    the recipe says the number of threads.
    """
    service, replica = _split(name)
    wanted = dict(cpu_environment(name))
    width, cores = recipe.rollout.tensor_parallel_size, sorted(os.sched_getaffinity(0))
    threads = {"trainer": recipe.trainer.num_threads, "rollout": recipe.rollout.num_threads}.get(service, "auto")
    if service == "rollout" and recipe.rollout.num_replicas * width > 1:
        workers = range(replica * width, (replica + 1) * width)
        mine = [cores[worker % len(cores)] for worker in workers]
        wanted |= find_engine(recipe.rollout.engine).core_environment(mine)
    elif service == "rollout" and threads == "auto":
        del wanted["OMP_NUM_THREADS"]  # the engine chooses
    environment = {key: os.environ.get(key, value) for key, value in wanted.items()}
    return environment if threads == "auto" else {**environment, "OMP_NUM_THREADS": str(threads)}


def cpu_environment(name: str) -> Mapping[str, str]:
    """Environment variables of the service `name` on any machine without a GPU."""
    return {**CPU_ENVIRONMENT, **ONE_ARENA} if _split(name)[0] == "rollout" else CPU_ENVIRONMENT


def set_allocator(name: str) -> None:
    """Gives this process the allocator's settings that the service `name` has where a run starts it, except for huge
    pages: glibc reads the variables only when a process starts. The user's are kept. Threads that run already may keep
    arenas of their own.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):  # not glibc
        return
    for variable, value in cpu_environment(name).items():
        if variable in _MALLOPT and variable not in os.environ:
            libc.mallopt(_MALLOPT[variable], int(value))


def automatic_threads(num_workers: int, hidden_size: int = 0) -> int:
    """The number of threads that `auto` stands for, of each of so many processes on this machine: an equal share of the
    cores, or OMP_NUM_THREADS if it is set and less. The trainer and the samplers share them all: one of the two often
    waits. Training a narrow model gets one thread unless the variable is set; a `hidden_size` of 0 is unknown.
    """
    given, share = os.environ.get("OMP_NUM_THREADS", ""), max(1, num_cores() // max(1, num_workers))
    if given.isdigit() and int(given):
        return min(int(given), share)
    return 1 if 0 < hidden_size < NARROW else share


def workers_of(recipe: Recipe) -> Mapping[str, int]:
    """How many processes compute for the trainer, and for all samplers."""
    rollout = recipe.rollout
    return {"trainer": recipe.trainer.num_ranks, "rollout": rollout.num_replicas * rollout.tensor_parallel_size}


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def starts_after(recipe: Recipe, name: str) -> str:
    """The service that has to be running before the service `name` starts; "" if it starts at once.

    Imports take ten seconds of processor time. With too few cores a simultaneous start would delay the first batch, so
    the first sampler starts before the others.
    """
    service, replica = _split(name)
    first_alone = service == "rollout" and replica > 0 and num_cores() < sum(workers_of(recipe).values())
    return "rollout-0" if first_alone else ""


def _gpus_of(recipe: Recipe, name: str, gpus: tuple[str, ...]) -> tuple[str, ...]:
    service, replica = _split(name)
    if service not in ("rollout", "trainer"):
        return ()
    if recipe.weights.backend == "ipc" or len(gpus) == 1:
        return gpus[:1]
    if service == "trainer":
        return gpus[: recipe.trainer.num_ranks]
    width = recipe.rollout.tensor_parallel_size
    first = recipe.trainer.num_ranks + replica * width
    return gpus[first : first + width]


def _split(name: str) -> tuple[str, int]:
    service, _, replica = name.partition("-")
    return service, int(replica or 0)
