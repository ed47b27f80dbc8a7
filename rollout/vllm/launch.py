"""Starts vLLM's engine with version stamps and staged weights, and with a fast start on CPUs."""

from __future__ import annotations

import gc
import os
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.protos.errors import LINES_ABOVE, EnvironmentLackError, ModelError
from tandem.protos.hidden_modules import hidden_module
from tandem.protos.manifest import ITEM_BYTES
from tandem.protos.options import MAX_TOP_K
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments, check_cache, check_memory, check_model_folder, one_line
from tandem.rollout.vllm.engine_folder import WORKER_EXTENSION, EngineFolder
from tandem.rollout.vllm.fused_norms import PRIORITY, register_fused_norms
from tandem.rollout.vllm.small_blocks import LEAST_BLOCK_TOKENS, allow_small_blocks, use_small_blocks

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

_ENGINE_BYTES = 700 << 20  # memory of vLLM without weights and KV cache
_PREFILL_TOKENS = 4096  # maximum per step on CPUs
_LARGE_BLOCK_TOKENS = 128  # vLLM's own blocks on CPUs


@hidden_module("ray")  # vLLM would load it only to ask whether this is an actor, and starts none of its workers here
def start_vllm(arguments: SamplerArguments, folder: EngineFolder) -> AsyncLLM:
    """Loads the model in a new engine process, whose sockets and temporary files are in `folder`.

    On CPUs the process is forked, so this must be called before this process has threads. Raises as `Engine.start`.
    """
    check_model_folder(arguments)
    if Path(arguments.model_path).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        vllm_config = engine_config(arguments)
    except Exception as error:  # errors of json, struct, safetensors, pydantic … for a bad folder
        raise ModelError(f"model {arguments.model_path} cannot be sampled: {one_line(error)}") from error
    on_cpu = _on_cpu()
    if on_cpu or arguments.shares_gpu:  # the engine's process checks this too, but reports it only in its log
        check_cache(arguments, _bytes_per_sequence(vllm_config, arguments.dtype))
    if on_cpu:
        check_memory(arguments, _ENGINE_BYTES)
    with folder.given_to_children():
        return _launch(vllm_config, arguments.model_path, fork=on_cpu)


def engine_config(arguments: SamplerArguments) -> VllmConfig:
    """vLLM's configuration of the engine. Raises vLLM's errors for a folder that is no model."""
    vllm_config = engine_arguments(arguments).create_engine_config()
    if _on_cpu():
        use_small_blocks(vllm_config)
    return vllm_config


def engine_arguments(arguments: SamplerArguments) -> AsyncEngineArgs:
    """Sets the environment for vLLM, which reads it at import, and returns the engine's settings."""
    on_cpu = _on_cpu()
    _prepare_environment(on_cpu, arguments.config)
    _import_vllm(on_cpu)
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = arguments.config
    max_sequences = min(arguments.max_rows, 1024)
    block_tokens = LEAST_BLOCK_TOKENS if on_cpu and arguments.max_model_tokens < _LARGE_BLOCK_TOKENS else None
    return AsyncEngineArgs(
        model=arguments.model_path,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_tokens,
        seed=arguments.seed % (1 << 31),
        tensor_parallel_size=config.tensor_parallel_size,
        enforce_eager=on_cpu,
        **({"ir_op_priority": PRIORITY} if on_cpu else {}),
        max_num_seqs=max_sequences,
        # Chunked prefill is off on CPUs. For a chunk whose token is discarded, vLLM rewinds the random generator, which
        # a CPU generator does not support, so a preempted seeded request would crash the engine. The first row of a
        # group also computes the whole prompt in one step (shared_prompts.py).
        enable_chunked_prefill=False if on_cpu else None,
        block_size=block_tokens,
        # Rows of a group share its prompt without this, and such short sequences have little else to share.
        enable_prefix_caching=None if block_tokens is None else False,
        max_num_batched_tokens=max(arguments.max_model_tokens, max_sequences, _PREFILL_TOKENS) if on_cpu else None,
        kv_cache_memory_bytes=config.kv_cache_bytes if on_cpu or arguments.shares_gpu else None,
        gpu_memory_utilization=config.gpu_memory_fraction,
        logprobs_mode="processed_logprobs",
        max_logprobs=MAX_TOP_K,
        async_scheduling=False,  # a step scheduled before but finished after an update would get the wrong stamp
        worker_extension_cls=WORKER_EXTENSION,
        disable_log_stats=True,
    )


def _launch(vllm_config: VllmConfig, model_path: str, *, fork: bool) -> AsyncLLM:
    from vllm.v1.engine.async_llm import AsyncLLM

    from tandem.rollout.vllm.plugin import extend_engine_core

    extend_engine_core()
    method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
    if fork:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # set here because creating the configuration resets it
        gc.freeze()  # the engine collects garbage several times at its start; inherited objects are excluded
    try:
        return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True, enable_log_requests=False)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentLackError(
            f"the engine for {model_path} does not start on this machine: {one_line(error)}; {LINES_ABOVE}"
        ) from error
    finally:
        if method is not None:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method


def _import_vllm(on_cpu: bool) -> None:
    """Imports vLLM; on CPUs without its changes to torch's compiler, which does not run there, and with the worker. A
    forked engine would import that more slowly: it copies memory as it writes, and collects garbage in what is new.
    """
    with hidden_module("torch._inductor") if on_cpu else nullcontext():
        import vllm
    import vllm.v1.engine.async_llm

    if on_cpu:
        import vllm.v1.worker.cpu_worker  # noqa: F401

        register_fused_norms()
        allow_small_blocks()


def _on_cpu() -> bool:
    return "+cpu" in version("torch")


def _prepare_environment(on_cpu: bool, config: RolloutConfig) -> None:
    """Sets variables that vLLM and OpenMP read at import. On CPUs they shorten the start from 45 to 8 seconds."""
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the workers of an engine are on one machine
    if on_cpu:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling one small kernel would take 19 s
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the worker runs in the engine's process
        # Threads that spin while they share cores with the trainer sample a tenth of the tokens.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if config.num_threads != "auto":
            os.environ["OMP_NUM_THREADS"] = str(config.num_threads)
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // 4)))


def _bytes_per_sequence(vllm_config: VllmConfig, dtype: str) -> int:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers, heads = model.get_num_layers(parallel), model.get_num_kv_heads(parallel)
    block_tokens = vllm_config.cache_config.block_size or 16
    num_tokens = -(-model.max_model_len // block_tokens) * block_tokens
    return 2 * layers * heads * model.get_head_size() * ITEM_BYTES[dtype] * num_tokens
