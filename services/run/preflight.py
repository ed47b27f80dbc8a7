"""Checks of a recipe before its run starts. Every fault is a UserError of one line. Imports neither torch nor vllm."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tandem.protos.errors import ConfigError, EnvironmentLackError, RunExistsError
from tandem.protos.extras import require_installed
from tandem.rollout.engine import find_engine
from tandem.services.addresses import is_loopback
from tandem.services.command_line import print_error
from tandem.services.config import Recipe
from tandem.services.config.recipe import JobsConfig
from tandem.services.metrics.ports import port_offset
from tandem.services.run.endpoint import check_network
from tandem.services.run.environment_checks import check_environment, check_environment_service
from tandem.services.run.estimates import LOG_COPIES, disk_need_bytes, job_bytes, memory_need_bytes, sampler_bytes
from tandem.services.run.folder import (
    CONFIG_FILE,
    cannot_write,
    external_redis_url,
    folder_in_use,
    redis_required,
    running,
    step_taken,
)
from tandem.services.run.model_check import (
    ModelFacts,
    check_adapters,
    check_critic,
    check_model,
    check_prompts,
    is_hub_name,
)
from tandem.services.run.placement import free_memory_bytes, gpu_ids, gpus_wanted, workers_of
from tandem.services.run.resume import check_resumable
from tandem.services.run.threads import check_threads
from tandem.trainer.backend import registry as training_backends
from tandem.trainer.batch.record import recorded_versions

if TYPE_CHECKING:
    from tandem.reward.rubric.rubric import Rubric

REDIS_SECONDS = 2.0
_PROBE_BYTES = 1 << 20
TRAINER_PACKAGES = ("torch", "transformers", "deepspeed", "peft", "safetensors", "xxhash")


def check_recipe(recipe: Recipe, *, resume: bool, on_this_machine: bool = True) -> ModelFacts | None:
    """Checks everything that can be checked before a run starts, cheap checks first. Raises a one-line UserError.

    Unless the services run on this machine, `check_machine` is left to the caller. Returns what is known of the model.
    """
    require_installed(*TRAINER_PACKAGES, *recipe.run.trackers)
    find_engine(recipe.rollout.engine).check(recipe.rollout)
    check_run_folder(recipe, resume=resume)
    training_backends.check_backend(recipe.trainer)
    check_dataset(recipe)
    facts = check_models(recipe)
    if on_this_machine:
        check_machine(recipe, facts)
    check_disk(recipe, facts)
    check_redis(recipe)
    check_reward(recipe)
    check_environment(recipe)
    if not is_hub_name(recipe.model.path):  # a hub model's tokenizer may not be downloaded yet
        check_prompts(recipe)
    return facts


def check_machine(recipe: Recipe, facts: ModelFacts | None) -> None:
    """Checks that this machine has the devices, the addresses and the memory for all services of the run."""
    check_backend(recipe)
    for service, num_workers in workers_of(recipe).items():
        check_threads(recipe, service, num_workers)
    check_network(recipe)
    check_ports(recipe)
    check_memory(recipe, facts)


def check_files(recipe: Recipe) -> None:
    """The checks that `tandem config` makes: datasets, scorers, and a model given as a local folder."""
    check_dataset(recipe)
    check_reward(recipe)
    check_environment(recipe)
    if not is_hub_name(recipe.model.path):
        check_models(recipe)


def check_service(recipe: Recipe, service: str, replica: int) -> None:
    """The checks that concern one service, made when `tandem serve` starts it."""
    if service == "trainer":
        require_installed(*TRAINER_PACKAGES, *recipe.run.trackers)
        check_dataset(recipe)
        training_backends.check_backend(recipe.trainer)
        check_models(recipe)
        check_backend(recipe, {"trainer.num_ranks": recipe.trainer.num_ranks})
        check_threads(recipe, service, recipe.trainer.num_ranks)
    elif service == "rollout":
        find_engine(recipe.rollout.engine).check(recipe.rollout)
        check_model(recipe)
        check_backend(recipe, {"rollout.tensor_parallel_size": recipe.rollout.tensor_parallel_size})
        check_threads(recipe, service, recipe.rollout.tensor_parallel_size)
    elif service == "feed":
        check_dataset(recipe)
        check_model(recipe)
    elif service == "environments":
        check_environment_service(recipe)
    elif service == "reward":
        check_reward(recipe)
    check_network(recipe)
    if external_redis_url(recipe):
        check_redis(recipe)
    name = f"{service}-{replica}" if service == "rollout" else service
    for key, owner, port in _ports(recipe):
        if owner == name:
            _check_port(recipe.run.host, key, port)


def check_run_folder(recipe: Recipe, *, resume: bool) -> None:
    """Checks that the folder of a new run holds no run, and that of a resumed run holds one this recipe can resume."""
    folder = recipe.folder
    if owner := running(folder):
        raise folder_in_use(folder, owner)
    if resume:
        check_resumable(recipe)
    elif (folder / CONFIG_FILE).exists() and step_taken(folder):
        fault = f"run folder {folder} already holds a run"
        raise RunExistsError(f"{fault}; add --resume to go on with it, choose another run.run_id, or delete the folder")


def check_dataset(recipe: Recipe) -> None:
    """Checks that the files of `[data]` and `[eval]` exist and open as datasets."""
    from tandem.services.data.dataset import Dataset

    for file in (*(one.path for one in recipe.data.train_files), *(one.file for one in recipe.eval_sets)):
        Dataset(file).row(0)


def check_models(recipe: Recipe) -> ModelFacts | None:
    """Checks the policy's model and that adapters and critic fit it. None for a hub model not downloaded yet."""
    facts = check_model(recipe)
    check_adapters(recipe, facts)
    num_critic_parameters = check_critic(recipe, facts)
    return None if facts is None else replace(facts, num_critic_parameters=num_critic_parameters)


def check_backend(recipe: Recipe, own_gpus: Mapping[str, int] | None = None) -> None:
    """Checks that this machine's devices support the weight backend. `own_gpus`: what a service of its own needs, by
    key. Without it, all services run here.
    """
    backend, gpus = recipe.weights.backend, gpu_ids()
    if backend in ("nccl", "ipc") and not gpus:
        raise ConfigError(
            f"weights.backend={backend} needs a GPU and this machine shows none; set weights.backend=gloo or disk"
        )
    if backend in ("nccl", "ipc") and torch_version().endswith("+cpu"):
        raise EnvironmentLackError(
            f"weights.backend={backend} needs torch for GPUs, and {torch_version()} is installed; use the images "
            "gpu-rollout and gpu-trainer, or install tandem-rl[gpu]"
        )
    all_here = {"trainer.num_ranks + rollout.num_replicas × rollout.tensor_parallel_size": gpus_wanted(recipe)}
    ((keys, wanted),) = (own_gpus or all_here).items()
    if backend == "nccl" and wanted > len(gpus):
        fault = f"weights.backend=nccl needs {wanted} GPUs ({keys}), this machine shows {len(gpus)}"
        raise ConfigError(f"{fault}; lower these, or share one GPU with weights.backend=ipc")
    if recipe.trainer.num_nodes > 1:
        _check_nodes(recipe)


def torch_version() -> str:
    """The installed torch, without loading it: PyPI's builds for CPUs end with `+cpu`."""
    return version("torch")


def _check_nodes(recipe: Recipe) -> None:
    """Checks that the machines of a trainer can reach Redis and one another."""
    redis_url = external_redis_url(recipe)
    if not redis_url:
        fault = "trainer.num_nodes > 1 needs a Redis that every machine reaches"
        raise ConfigError(f"{fault}; set run.redis_url or TANDEM_REDIS_URL, an embedded one listens on a unix socket")
    redis_host = urlsplit(redis_url).hostname
    if is_loopback(recipe.run.host) and redis_host is not None and not is_loopback(redis_host):
        fault = f"trainer.num_nodes > 1, and run.host={recipe.run.host} cannot be reached from other machines"
        raise ConfigError(f"{fault}; set it on each machine to its own address, e.g. run.host=10.0.0.1")


def check_ports(recipe: Recipe) -> None:
    """Checks that every port of the recipe is free and used once."""
    taken: dict[int, str] = {}
    for key, owner, port in _ports(recipe):
        if port in taken:
            raise ConfigError(
                f"{key}: port {port} of {owner} is also that of {taken[port]}; choose another, or 0 for a free one"
            )
        taken[port] = owner
        _check_port(recipe.run.host, key, port)


def check_disk(recipe: Recipe, facts: ModelFacts | None) -> None:
    """Checks that the run folder is writable and its disk has room for the estimated size of the run."""
    place = _there(recipe.folder)
    try:
        if not place.is_dir():
            raise NotADirectoryError(20, "not a folder", str(place))
        with tempfile.NamedTemporaryFile(dir=place, prefix=".tandem-probe-") as probe:
            probe.write(b"\0" * _PROBE_BYTES)
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as error:
        raise cannot_write(place, error) from None
    last_version = max(recorded_versions(recipe.folder), default=0)
    need, free = disk_need_bytes(recipe, facts, last_version=last_version), shutil.disk_usage(place).free
    free += sum(_bytes_in(recipe.folder / name) for name in ("checkpoints", "redis"))  # later ones replace them
    if free < need:
        raise EnvironmentLackError(
            f"{place}: {_size(free)} free, and the run writes about {_size(need)} (checkpoints, exports, batches, "
            "Redis); free space there, lower trainer.keep_checkpoints or raise trainer.export_every, or choose "
            "another run.folder"
        )


def _bytes_in(folder: Path) -> int:
    """Bytes of all files below the folder. Those that are deleted meanwhile do not count."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += file.stat().st_size if file.is_file() else 0
    return total


def check_job_room(jobs: JobsConfig, folder: Path) -> None:
    """Checks that memory and disk can hold the jobs of an embedded Redis in this folder."""
    lower = "lower jobs.max_unscored_bytes or jobs.max_result_bytes"
    need, free = jobs.redis_bytes, free_memory_bytes()
    if need > free:
        lack = f"memory: jobs may take {_size(need)}, {_size(free)} are free"
        raise EnvironmentLackError(f"{lack}; {lower}, or end other programs")
    place = _there(folder)
    log = sum(file.stat().st_size for file in (folder / "redis").rglob("*") if file.is_file())
    need, free = LOG_COPIES * need, shutil.disk_usage(place).free + log
    if need > free:
        lack = f"{place}: {_size(free)} free, and Redis writes up to {_size(need)} for jobs"
        raise EnvironmentLackError(f"{lack}; free space there, {lower}, or choose another --folder")


def _there(folder: Path) -> Path:
    """The folder, or its nearest parent that exists."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def check_memory(recipe: Recipe, facts: ModelFacts | None) -> None:
    """Without a GPU, checks that engines, trainer and the jobs of an embedded Redis fit into free memory."""
    if gpu_ids() or facts is None:
        return
    rollout = recipe.rollout
    engines, training = memory_need_bytes(recipe, facts)
    jobs = 0 if external_redis_url(recipe) else job_bytes(recipe)
    free = free_memory_bytes()
    if engines + training + jobs > free:
        beside = f", jobs up to {_size(jobs)}" if jobs else ""
        lower = "rollout.kv_cache_bytes, rollout.num_replicas or trainer.tokens_per_micro_batch" + (
            " or jobs.max_unscored_bytes" if jobs else ""
        )
        raise EnvironmentLackError(
            f"memory: {rollout.num_replicas} engine(s) with rollout.kv_cache_bytes={rollout.kv_cache_bytes} need about "
            f"{_size(engines)} and the trainer {_size(training)}{beside}, {_size(free)} are free; lower {lower}, or "
            "end other programs"
        )


def check_added_samplers(recipe: Recipe, added: int) -> None:
    """Checks that this machine holds `added` samplers more beside what runs already; `recipe` counts them in."""
    if added <= 0:
        return
    check_backend(recipe)
    if gpu_ids():
        wanted, gpus = gpus_wanted(recipe), len(gpu_ids())
        if wanted > gpus:
            raise EnvironmentLackError(f"the run would need {wanted} GPUs, this machine shows {gpus}")
    elif (facts := check_model(recipe)) is not None:
        need, free = added * sampler_bytes(recipe, facts), free_memory_bytes()
        if need > free:
            fault = f"memory: {added} more sampler(s) need about {_size(need)}, {_size(free)} are free"
            raise EnvironmentLackError(f"{fault}; ask for fewer, or end other programs")


def check_redis(recipe: Recipe) -> None:
    """Checks that the user's Redis answers and keeps its keys, printing warnings, or that redis-server is installed."""
    url = external_redis_url(recipe)
    if not url:
        from tandem.services.buffer.redis_server import find_redis_server

        find_redis_server()
        return
    from tandem.services.buffer.buffer import Buffer
    from tandem.services.buffer.durability import check_settings

    with redis_required(), closing(Buffer(url, recipe.run.run_id, connect_timeout_seconds=REDIS_SECONDS)) as buffer:
        for line in check_settings(buffer.connection):
            print_error(line)


def check_reward(recipe: Recipe) -> None:
    """Checks that the scorers import and accept their arguments, that the estimator can use their components, and that
    evaluation sets name scorers that exist.
    """
    from tandem.reward.scoring import validate

    rubric = validate(recipe.reward, {one.name: one.rubric for one in recipe.eval_sets if one.rubric})
    if recipe.trainer.needs_components:
        _check_components(recipe, rubric)


def _check_components(recipe: Recipe, rubric: Rubric) -> None:
    """Checks the rubric for an estimator that compares components: it needs all of them in every row, with a weight."""
    components = {component.name: component for component in rubric.components}
    if "" in components:
        return  # a rubric of one scorer: its components are unknown before its first score
    weights, names = getattr(recipe.trainer.advantage, "weights", ()), ", ".join(sorted(components))
    file, estimator = recipe.reward.rubric, f"trainer.advantage {recipe.trainer.advantage.name}"
    if weights and len(weights) != len(components):
        fault = f"trainer.advantage.weights has {len(weights)} entries for the {len(components)} components of {file}"
        raise ConfigError(f"{fault}; give one for each of {names}, in this order")
    for name, component in components.items():
        if component.optional:
            fault = f"{file}: component {name} is optional, and {estimator} needs it in every row"
            raise ConfigError(f"{fault}; take optional away, or choose another estimator")
        if component.weight == 0 and not weights:
            fault = f"{file}: component {name} has weight 0, and {estimator} would train on it"
            raise ConfigError(f"{fault}; give trainer.advantage.weights, for {names} in this order")


def _ports(recipe: Recipe) -> Iterator[tuple[str, str, int]]:
    """(key, service, port) of every fixed port; port 0, any free one, is left out."""
    if recipe.rollout.port:
        for replica in range(max(recipe.rollout.num_replicas, 1)):
            yield "rollout.port", f"rollout-{replica}", recipe.rollout.port + replica
    if recipe.reward.port:
        yield "reward.port", "reward", recipe.reward.port
    if recipe.run.control_port:
        yield "run.control_port", "controller", recipe.run.control_port
    if recipe.trainer.port:
        yield "trainer.port", "trainer", recipe.trainer.port
    if recipe.run.metrics_port:
        samplers = [f"rollout-{replica}" for replica in range(max(recipe.rollout.num_replicas, 1))]
        samplers += ["environments-0"] * recipe.environment.service
        for name in ("controller", "feed", "reward", "trainer", *samplers):
            yield "run.metrics_port", f"the metrics of {name}", port_offset(name) + recipe.run.metrics_port


def _check_port(host: str, key: str, port: int) -> None:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        fault = f"{key}: cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error})"
        raise EnvironmentLackError(f"{fault}; end what uses it, choose another {key}, or 0 for a free one") from None


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"
