"""Starts vLLM's engine the way a sampler needs it: stamped log-probs, staged weights, and on CPUs in seconds."""

from __future__ import annotations

import gc
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from tandem.protos.errors import LINES_ABOVE, EnvironmentLackError, ModelError
from tandem.rollout.config import RolloutConfig
from tandem.rollout.vllm.engine_folder import EngineFolder

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

_ENGINE_BYTES = 700 << 20  # what vLLM takes besides weights and KV cache
_PREFILL_TOKENS = 4096  # read in one step at most, on CPUs
_ITEM_BYTES = {"float32": 4, "bfloat16": 2}


def start_vllm(
    config: RolloutConfig,
    *,
    model_path: str,
    dtype: Literal["float32", "bfloat16"],
    max_model_tokens: int,
    seed: int,
    shares_gpu: bool,
    rows_per_group: int,
    folder: EngineFolder,
) -> AsyncLLM:
    """Loads the model into an engine process of its own; on CPUs forked, so before this process has threads. Its
    sockets and temporary files are in `folder`.

    Raises:
        ModelError: vLLM cannot use the model.
        EnvironmentLackError: memory is short, or the engine does not start on this machine.
    """
    is_folder = Path(model_path).is_dir()
    if not is_folder and (Path(model_path).is_absolute() or model_path.startswith((".", "~"))):
        raise ModelError(f"model folder {model_path} does not exist; set model.path to a Hugging Face folder")
    if is_folder:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
    on_cpu = _vllm_is_for_cpus()
    _prepare_environment(on_cpu)
    from vllm.engine.arg_utils import AsyncEngineArgs

    fixed_cache = on_cpu or shares_gpu
    max_sequences = min(config.max_groups_in_flight * rows_per_group, 1024)
    arguments = AsyncEngineArgs(
        model=model_path,
        dtype=dtype,
        max_model_len=max_model_tokens,
        seed=seed % (1 << 31),
        tensor_parallel_size=config.tensor_parallel_size,
        enforce_eager=on_cpu,
        max_num_seqs=max_sequences,
        # On CPUs a prompt is never read in parts: vLLM would turn back the random numbers of a part whose token is
        # discarded, which a CPU's generator cannot, and the engine would die of a seeded request that was preempted.
        enable_chunked_prefill=False if on_cpu else None,
        max_num_batched_tokens=max(max_model_tokens, max_sequences, _PREFILL_TOKENS) if on_cpu else None,
        kv_cache_memory_bytes=config.kv_cache_bytes if fixed_cache else None,
        gpu_memory_utilization=config.gpu_memory_fraction,
        logprobs_mode="processed_logprobs",
        async_scheduling=False,  # a step scheduled before an update but finished after it would get the wrong stamp
        worker_extension_cls="tandem.rollout.vllm.worker_extension.WeightReceiver",
        disable_log_stats=True,
    )
    try:
        vllm_config = arguments.create_engine_config()
    except Exception as error:  # whatever it trips over in a folder: json, struct, safetensors, pydantic …
        raise ModelError(f"model {model_path} cannot be sampled: {one_line(error)}") from error
    if fixed_cache:
        _check_cache(vllm_config, dtype, config.kv_cache_bytes)
    if on_cpu:
        _check_memory(Path(model_path), config.kv_cache_bytes)
    with folder.given_to_children():
        return _launch(vllm_config, model_path, fork=on_cpu)


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


def one_line(error: BaseException) -> str:
    """The telling line of an exception's text (pydantic wraps it into several)."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    telling = [line for line in lines if line.startswith("Value error, ")] or lines or [type(error).__name__]
    return telling[0].removeprefix("Value error, ").partition(" [type=")[0][:300]


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


def _check_cache(vllm_config: VllmConfig, dtype: str, kv_cache_bytes: int) -> None:
    """The engine's process would find this too, but only its log would say it."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    layers, heads = model.get_num_layers(parallel), model.get_num_kv_heads(parallel)
    block_tokens = vllm_config.cache_config.block_size or 16
    num_tokens = -(-model.max_model_len // block_tokens) * block_tokens
    needed = 2 * layers * heads * model.get_head_size() * _ITEM_BYTES[dtype] * num_tokens
    if needed > kv_cache_bytes:
        raise EnvironmentLackError(
            f"rollout.kv_cache_bytes={kv_cache_bytes} holds no whole sequence: "
            f"{model.max_model_len} tokens take {needed} bytes; "
            "raise it, or lower data.max_prompt_tokens or rollout.max_response_tokens"
        )


def _check_memory(folder: Path, kv_cache_bytes: int) -> None:
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors")) if folder.is_dir() else 0
    needed, free = (
        2 * weights + kv_cache_bytes + _ENGINE_BYTES,
        psutil.virtual_memory().available,
    )  # a staged version counts too
    if needed > free:
        raise EnvironmentLackError(
            f"the engine for {folder} needs about {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free; "
            "lower rollout.kv_cache_bytes or rollout.num_replicas, or end other programs"
        )
