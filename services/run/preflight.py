"""Finds bad input before anything starts; every fault is a UserError of one line. Imports neither torch nor vllm."""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.protos.errors import ConfigError, EnvironmentLackError, RunExistsError, UnavailableError
from tandem.protos.extras import require_installed
from tandem.rollout.engine import find_engine
from tandem.services.command_line import print_error
from tandem.services.config import Recipe
from tandem.services.config.jobs import JobsConfig
from tandem.services.run.folder import CONFIG_FILE, cannot_write, external_redis_url, running, step_taken
from tandem.services.run.model_check import ModelFacts, check_adapters, check_critic, check_model, is_hub_name
from tandem.services.run.placement import gpu_ids, gpus_wanted
from tandem.services.run.prompt_check import check_prompts
from tandem.services.run.resume import check_resumable
from tandem.trainer.backend import registry as training_backends

if TYPE_CHECKING:
    from tandem.reward.rubric.rubric import Rubric

ENGINE_BYTES = 1e9
"""Resident memory of one engine beside its weights and its KV cache; the same holds for one rank of the trainer."""
OPTIMIZER_BYTES_PER_PARAMETER = 12
"""float32 master weight and the two moments of AdamW."""
TRAINING_BYTES_PER_PARAMETER = 16
REDIS_SECONDS = 2.0
_PAYLOAD_BYTES_PER_TOKEN = 4 + 4 + 1 + 4
_LOG_COPIES = 3  # what Redis' log holds of its memory when it has doubled and is being rewritten
_PROBE_BYTES = 1 << 20
TRAINER_PACKAGES = ("torch", "transformers", "deepspeed", "peft", "safetensors")


def check_recipe(recipe: Recipe, *, resume: bool) -> None:
    """Checks whatever can be checked before a run starts, the cheapest first.

    Raises:
        UserError: the first fault found, in one line.
    """
    require_installed(*TRAINER_PACKAGES)
    find_engine(recipe.rollout.engine).check(recipe.rollout)
    check_run_folder(recipe, resume=resume)
    training_backends.check_backend(recipe.trainer)
    check_dataset(recipe)
    facts = check_models(recipe)
    check_backend(recipe)
    check_ports(recipe)
    check_disk(recipe, facts)
    check_memory(recipe, facts)
    check_redis(recipe)
    check_reward(recipe)
    if not is_hub_name(recipe.model.path):  # else the tokenizer might have to be downloaded first
        check_prompts(recipe)


def check_files(recipe: Recipe) -> None:
    """The part of it that `tandem config` does: datasets, scorer, and a model that should be on this disk.

    Raises:
        UserError: as `check_recipe`.
    """
    check_dataset(recipe)
    check_reward(recipe)
    if not is_hub_name(recipe.model.path):
        check_models(recipe)


def check_service(recipe: Recipe, service: str, replica: int) -> None:
    """The part of it that concerns one service started by hand with `tandem serve`.

    Raises:
        UserError: as `check_recipe`.
    """
    if service == "trainer":
        require_installed(*TRAINER_PACKAGES)
    if service == "rollout":
        find_engine(recipe.rollout.engine).check(recipe.rollout)
    if service in ("feed", "trainer"):
        check_dataset(recipe)
    if service == "trainer":
        training_backends.check_backend(recipe.trainer)
        check_models(recipe)
    elif service != "reward":
        check_model(recipe)
    if service in ("rollout", "trainer"):
        check_backend(recipe)
    if service == "reward":
        check_reward(recipe)
    if external_redis_url(recipe):
        check_redis(recipe)
    name = f"{service}-{replica}" if service == "rollout" else service
    for key, owner, port in _ports(recipe):
        if owner == name:
            _check_port(recipe.run.host, key, port)


def check_run_folder(recipe: Recipe, *, resume: bool) -> None:
    """A new run needs a folder without a run in it; a resumed one needs its run there, which learned by this recipe."""
    folder = recipe.folder
    config = folder / CONFIG_FILE
    owner = running(folder)
    if owner is not None:
        raise RunExistsError(
            f"run folder {folder}: another supervisor (pid {owner.pid}) runs in it; "
            "stop that one first, or choose another run.folder"
        )
    if not resume:
        if config.exists() and step_taken(folder):
            raise RunExistsError(
                f"run folder {folder} already holds a run; add --resume to go on with it, choose another run.run_id, "
                "or delete the folder"
            )
        return
    check_resumable(recipe)


def check_dataset(recipe: Recipe) -> None:
    """The files of `[data]` are there and open as datasets."""
    from tandem.services.data.dataset import check_file

    for file in filter(None, (*(one.path for one in recipe.data.train_files), recipe.data.eval_file)):
        check_file(file)


def check_models(recipe: Recipe) -> ModelFacts | None:
    """The policy's model can be used, and what is trained beside it or inside it goes with it; None for a hub model not
    here yet.
    """
    facts = check_model(recipe)
    check_adapters(recipe, facts)
    num_critic_parameters = check_critic(recipe, facts)
    return None if facts is None else replace(facts, num_critic_parameters=num_critic_parameters)


def check_backend(recipe: Recipe) -> None:
    """The weights can travel on this machine's devices."""
    backend, gpus = recipe.weights.backend, gpu_ids()
    if backend in ("nccl", "ipc") and not gpus:
        raise ConfigError(
            f"weights.backend={backend} needs a GPU and this machine shows none; set weights.backend=gloo or disk"
        )
    wanted = gpus_wanted(recipe)
    if backend == "nccl" and wanted > len(gpus):
        raise ConfigError(
            f"weights.backend=nccl needs {wanted} GPUs (trainer.num_ranks + "
            "rollout.num_replicas × rollout.tensor_parallel_size), "
            f"this machine shows {len(gpus)}; lower these, or share one GPU with weights.backend=ipc"
        )
    if recipe.trainer.num_nodes > 1 and not external_redis_url(recipe):
        raise ConfigError(
            "trainer.num_nodes > 1 needs a Redis that every machine reaches; set run.redis_url or TANDEM_REDIS_URL, "
            "an embedded one listens on a unix socket"
        )


def check_ports(recipe: Recipe) -> None:
    """Every port the recipe names is free and named once."""
    taken: dict[int, str] = {}
    for key, owner, port in _ports(recipe):
        if port in taken:
            raise ConfigError(
                f"{key}: port {port} of {owner} is also that of {taken[port]}; choose another, or 0 for a free one"
            )
        taken[port] = owner
        _check_port(recipe.run.host, key, port)


def check_disk(recipe: Recipe, facts: ModelFacts | None) -> None:
    """The run folder can be written, and its disk holds roughly what the run will write."""
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
    need, free = disk_need_bytes(recipe, facts), shutil.disk_usage(place).free
    if free < need:
        raise EnvironmentLackError(
            f"{place}: {_size(free)} free, and the run writes about {_size(need)} "
            "(checkpoints, exports, batches, Redis); "
            "free space there, lower trainer.keep_checkpoints or raise "
            "trainer.export_every, or choose another run.folder"
        )


def disk_need_bytes(recipe: Recipe, facts: ModelFacts | None) -> float:
    """An estimate: checkpoints and exports without adapters, payloads for answers of half the longest length, jobs."""
    run, trainer = recipe.run, recipe.trainer
    group = recipe.rows_per_group * (recipe.data.max_prompt_tokens + recipe.rollout.max_response_tokens) / 2 * 12
    payloads = group * (run.total_batches * run.groups_per_batch + _LOG_COPIES * recipe.credits)
    payloads += 0 if external_redis_url(recipe) else _LOG_COPIES * job_bytes(recipe)
    if facts is None:
        return payloads
    checkpoints = min(
        trainer.keep_checkpoints + 1, 1 + run.total_batches // (trainer.checkpoint_every or run.total_batches + 1)
    )
    exports = 1 + (run.total_batches // trainer.export_every if trainer.export_every else 0)
    num_trained = facts.num_critic_parameters + (facts.num_parameters if trainer.lora is None else 0)
    checkpoint = num_trained * OPTIMIZER_BYTES_PER_PARAMETER
    return payloads + checkpoints * checkpoint + exports * facts.num_parameters * _weight_bytes(recipe)


def worst_case_redis_bytes(recipe: Recipe) -> int:
    """Payloads of all credits if every answer is as long as it may be: id, log-prob, mask and text of each token."""
    return recipe.credits * recipe.rows_per_group * recipe.max_model_tokens * _PAYLOAD_BYTES_PER_TOKEN


def job_bytes(recipe: Recipe) -> int:
    """What jobs may take in the run's Redis; 0 without `reward.port`, where no client finds the service."""
    return recipe.jobs.redis_bytes if recipe.reward.port else 0


def check_job_room(jobs: JobsConfig, folder: Path) -> None:
    """An embedded Redis in this folder has memory and disk for all that jobs may hold.

    Raises:
        EnvironmentLackError: it has not.
    """
    lower = "lower jobs.max_unscored_bytes or jobs.max_result_bytes"
    need, free = jobs.redis_bytes, free_memory_bytes()
    if need > free:
        raise EnvironmentLackError(
            f"memory: jobs may take {_size(need)}, {_size(free)} are free; {lower}, or end other programs"
        )
    place = _there(folder)
    log = sum(file.stat().st_size for file in (folder / "redis").rglob("*") if file.is_file())
    need, free = _LOG_COPIES * need, shutil.disk_usage(place).free + log
    if need > free:
        raise EnvironmentLackError(
            f"{place}: {_size(free)} free, and Redis writes up to {_size(need)} for jobs; free space there, {lower}, "
            "or choose another --folder"
        )


def _there(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(place for place in (folder, *folder.absolute().parents) if place.exists())


def check_memory(recipe: Recipe, facts: ModelFacts | None) -> None:
    """Without a GPU, engines, trainer and the jobs in an embedded Redis fit into the memory that is free now."""
    if gpu_ids() or facts is None:
        return
    rollout, lora = recipe.rollout, recipe.trainer.lora
    weights = facts.num_parameters * _weight_bytes(recipe)
    # Weights count twice in a sampler: a staged update holds the next version beside the one in use. Adapters that
    # travel alone are merged into a third copy, the base; it is a mapped file at best, but has to be in memory all the
    # same.
    copies = 3 if lora is not None and lora.broadcast == "adapter" else 2
    engines = rollout.num_replicas * (rollout.kv_cache_bytes + copies * weights + ENGINE_BYTES)
    training = _training_bytes(recipe, facts)
    jobs = 0 if external_redis_url(recipe) else job_bytes(recipe)
    free = free_memory_bytes()
    if engines + training + jobs > free:
        beside = f", jobs up to {_size(jobs)}" if jobs else ""
        lower = "rollout.kv_cache_bytes or rollout.num_replicas" + (" or jobs.max_unscored_bytes" if jobs else "")
        raise EnvironmentLackError(
            f"memory: {rollout.num_replicas} engine(s) with rollout.kv_cache_bytes={rollout.kv_cache_bytes} need about "
            f"{_size(engines)} and the trainer {_size(training)}{beside}, {_size(free)} "
            f"are free; lower {lower}, or end other programs"
        )


def _training_bytes(recipe: Recipe, facts: ModelFacts) -> float:
    trainer, weights = recipe.trainer, facts.num_parameters * _weight_bytes(recipe)
    policy = weights if trainer.lora is not None else facts.num_parameters * TRAINING_BYTES_PER_PARAMETER
    critic = facts.num_critic_parameters * TRAINING_BYTES_PER_PARAMETER
    reference = (
        weights if trainer.needs_reference and trainer.lora is None else 0
    )  # with adapters it is the base weights
    return policy + critic + reference + trainer.num_ranks * ENGINE_BYTES


def free_memory_bytes() -> float:
    """Memory that this process may still take: what the machine has free, or what is left of its cgroup's limit."""
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


def check_redis(recipe: Recipe) -> None:
    """The Redis the user named answers and keeps what it is given; without one, there is a redis-server to start.

    What it may lose is told on standard error; one that evicts is refused.
    """
    url = external_redis_url(recipe)
    if not url:
        from tandem.services.buffer.redis_server import find_redis_server

        find_redis_server()
        return
    from tandem.services.buffer.buffer import Buffer
    from tandem.services.buffer.durability import check_settings

    try:
        with closing(Buffer(url, recipe.run.run_id, connect_timeout_seconds=REDIS_SECONDS)) as buffer:
            for line in check_settings(buffer.connection):
                print_error(line)
    except UnavailableError as error:
        raise EnvironmentLackError(str(error)) from None


def check_reward(recipe: Recipe) -> None:
    """The scorers exist, import, and accept their arguments; the estimator can use their components."""
    from tandem.reward.scoring import validate

    rubric = validate(recipe.reward)
    if recipe.trainer.needs_components:
        _check_components(recipe, rubric)


def _check_components(recipe: Recipe, rubric: Rubric) -> None:
    """An estimator that compares components needs each of them in every row, and a weight for each."""
    components = {component.name: component for component in rubric.components}
    if "" in components:
        return  # a scorer alone: its components are not known before it has judged
    weights = getattr(recipe.trainer.advantage, "weights", ())
    if weights and len(weights) != len(components):
        raise ConfigError(
            f"trainer.advantage.weights has {len(weights)} entries for the {len(components)} "
            f"components of {recipe.reward.rubric}; "
            f"give one for each of {', '.join(sorted(components))}, in this order"
        )
    for name, component in components.items():
        if component.optional:
            raise ConfigError(
                f"{recipe.reward.rubric}: component {name} is optional, and trainer.advantage "
                f"{recipe.trainer.advantage.name} needs it "
                "in every row; take optional away, or choose another estimator"
            )
        if component.weight == 0 and not weights:
            raise ConfigError(
                f"{recipe.reward.rubric}: component {name} has weight 0, and trainer.advantage "
                f"{recipe.trainer.advantage.name} would "
                f"train on it; give trainer.advantage.weights, for {', '.join(sorted(components))} in this order"
            )


def _ports(recipe: Recipe) -> Iterator[tuple[str, str, int]]:
    """(key, service, port) of every port that is not left to chance."""
    if recipe.rollout.port:
        for replica in range(max(recipe.rollout.num_replicas, 1)):
            yield "rollout.port", f"rollout-{replica}", recipe.rollout.port + replica
    if recipe.reward.port:
        yield "reward.port", "reward", recipe.reward.port
    if recipe.trainer.port:
        yield "trainer.port", "trainer", recipe.trainer.port


def _check_port(host: str, key: str, port: int) -> None:
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        raise EnvironmentLackError(
            f"{key}: cannot listen on {host}:{port} ({getattr(error, 'strerror', None) or error}); "
            f"end what uses it, choose another {key}, or 0 for a free one"
        ) from None


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e8 else f"{num_bytes / 1e6:.1f} MB"


def _weight_bytes(recipe: Recipe) -> int:
    return 4 if recipe.trainer.dtype == "float32" else 2
