"""Starts vLLM's engine the way a sampler needs it: stamped log-probs, staged weights, and on CPUs in seconds."""

from __future__ import annotations

import gc
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from tandem.protos.errors import LINES_ABOVE, EnvironmentLackError, ModelError
from tandem.protos.manifest import ITEM_BYTES
from tandem.rollout.engine import SamplerArguments, check_cache, check_memory, check_model_folder, one_line
from tandem.rollout.vllm.engine_folder import EngineFolder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

_ENGINE_BYTES = 700 << 20  # what vLLM takes besides weights and KV cache
_PREFILL_TOKENS = 4096  # read in one step at most, on CPUs


def start_vllm(arguments: SamplerArguments, folder: EngineFolder) -> AsyncLLM:
    """Loads the model into an engine process of its own; on CPUs forked, so before this process has threads. Its
    sockets and temporary files are in `folder`.

    Raises:
        ModelError: vLLM cannot use the model.
        EnvironmentLackError: memory is short, or the engine does not start on this machine.
    """
    check_model_folder(arguments)
    if Path(arguments.model_path).is_dir():
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    on_cpu = _vllm_is_for_cpus()
    _prepare_environment(on_cpu)
    from vllm.engine.arg_utils import AsyncEngineArgs

    config = arguments.config
    fixed_cache = on_cpu or arguments.shares_gpu
    max_sequences = min(arguments.max_rows, 1024)
    engine_args = AsyncEngineArgs(
        model=arguments.model_path,
        dtype=arguments.dtype,
        max_model_len=arguments.max_model_tokens,
        seed=arguments.seed % (1 << 31),
        tensor_parallel_size=config.tensor_parallel_size,
        enforce_eager=on_cpu,
        max_num_seqs=max_sequences,
        # On CPUs a prompt is never read in parts: vLLM would turn back the random numbers of a part whose token is
        # discarded, which a CPU's generator cannot, and the engine would die of a seeded request that was preempted.
        enable_chunked_prefill=False if on_cpu else None,
        max_num_batched_tokens=max(arguments.max_model_tokens, max_sequences, _PREFILL_TOKENS) if on_cpu else None,
        kv_cache_memory_bytes=config.kv_cache_bytes if fixed_cache else None,
        gpu_memory_utilization=config.gpu_memory_fraction,
        logprobs_mode="processed_logprobs",
        async_scheduling=False,  # a step scheduled before an update but finished after it would get the wrong stamp
        worker_extension_cls="tandem.rollout.vllm.worker_extension.WeightReceiver",
        disable_log_stats=True,
    )
    try:
        vllm_config = engine_args.create_engine_config()
    except Exception as error:  # whatever it trips over in a folder: json, struct, safetensors, pydantic …
        raise ModelError(f"model {arguments.model_path} cannot be sampled: {one_line(error)}") from error
    if fixed_cache:  # the engine's process would find this too, but only its log would say it
        check_cache(arguments, _bytes_per_sequence(vllm_config, arguments.dtype))
    if on_cpu:
        check_memory(arguments, _ENGINE_BYTES)
    with folder.given_to_children():
        return _launch(vllm_config, arguments.model_path, fork=on_cpu)


def _launch(vllm_config: VllmConfig, model_path: str, *, fork: bool) -> AsyncLLM:
    from vllm.v1.engine.async_llm import AsyncLLM

    from tandem.rollout.vllm.plugin import extend_engine_core

    extend_engine_core()
    method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
    if fork:
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"  # not earlier: creating the configuration resets it
        gc.freeze()  # the engine collects garbage several times as it starts; what it inherits is none
    try:
        return AsyncLLM.from_vllm_config(vllm_config, disable_log_stats=True, enable_log_requests=False)
    except (RuntimeError, ValueError) as error:
        raise EnvironmentLackError(
            f"the engine for {model_path} does not start on this machine: {one_line(error)}; {LINES_ABOVE}"
        ) from error
    finally:
        if method is not None:
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = method


def _vllm_is_for_cpus() -> bool:
    try:
        return "+cpu" in version("torch")
    except PackageNotFoundError:
        raise EnvironmentLackError("torch is not installed; run `make setup`") from None


def _prepare_environment(on_cpu: bool) -> None:
    """What vLLM and OpenMP read when they are imported. On CPUs it makes the difference between 45 and 8 seconds of
    start.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    if on_cpu:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # compiling one small kernel would take 19 s
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the worker lives in the engine's process
        # Threads that share cores with the trainer's spin against it: two on two busy cores give a tenth of one's
        # tokens.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // 4)))


def _bytes_per_sequence(vllm_config: VllmConfig, dtype: str) -> int:
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers, heads = model.get_num_layers(parallel), model.get_num_kv_heads(parallel)
    block_tokens = vllm_config.cache_config.block_size or 16
    num_tokens = -(-model.max_model_len // block_tokens) * block_tokens
    return 2 * layers * heads * model.get_head_size() * ITEM_BYTES[dtype] * num_tokens
