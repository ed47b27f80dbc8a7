"""Tests specific to the vLLM engine: shared prompts, an engine process that dies, tensor-parallel workers."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tandem.protos.errors import ConfigError, DataError, TandemError, UnavailableError
from tandem.protos.types import SamplingParameters, Segment
from tandem.rollout.config import RolloutConfig
from tandem.rollout.engine import SamplerArguments, find_engine, remove_leftovers
from tandem.rollout.segments import first_tokens
from tandem.rollout.vllm import replaced_modules
from tandem.services.buffer.store_source import redis_store
from tests.support.adapter_policy import AdapterPolicy
from tests.support.engine_process import EngineProcess
from tests.support.tiny_model import build_tiny_model
from tests.support.vllm_notes import note_copies
from tests.support.waiting import eventually
from tests.support.weight_ring import AdapterRing, Policy, Ring

PROMPT = list(range(10, 22))
CONFIG = RolloutConfig(engine="vllm", kv_cache_bytes=64 << 20, samples_per_prompt=4)


@pytest.mark.parametrize("temperature", [0.005, 2.5])
def test_a_temperature_at_which_vllm_does_not_sample_is_refused_before_a_run(temperature: float) -> None:
    with pytest.raises(ConfigError, match=rf"rollout\.temperature={temperature}: vLLM samples at 0\.01 to 2"):
        find_engine("vllm").check(CONFIG.model_copy(update={"temperature": temperature}))


def note_modules(file: Path) -> None:
    """Writes the names of the modules that are loaded when this process forks."""
    os.register_at_fork(before=lambda: file.write_text(" ".join(name for name, one in sys.modules.items() if one)))


def note_living_versions(file: Path) -> None:
    """Writes how many of the versions that were put in place still have a parameter in memory, after each of them."""
    from tandem.rollout.vllm import worker_extension

    gc.disable()  # inherited by the engine's process
    replace, versions = worker_extension.replace, []

    def noted(replacements: list[Any]) -> None:
        replace(replacements)
        modules = [running for running, _ in replacements]
        versions.append([weakref.ref(one) for module in modules for one in module.parameters(recurse=False)])
        living = sum(any(parameter() is not None for parameter in version) for version in versions)
        with file.open("a") as opened:
            opened.write(f"{living}\n")

    worker_extension.replace = noted


def note_all(folder: Path) -> None:
    note_modules(folder / "modules")
    note_copies(folder / "copies")
    note_living_versions(folder / "living")


@pytest.mark.system
def test_an_engine_from_its_start_until_it_is_killed(tmp_path: Path, redis_url: str) -> None:
    """One engine for all that can be checked of the same one, because it takes 20 s to start."""
    folder = build_tiny_model(tmp_path / "model", hidden=64, ends=False)
    store = redis_store(redis_url, "whole", "weights")
    arguments = SamplerArguments(CONFIG, str(folder), "float32", max_model_tokens=512, seed=3, group_store=store)
    with EngineProcess(arguments, partial(note_all, tmp_path)) as engine:
        modules = (tmp_path / "modules").read_text().split()
        assert "vllm.v1.worker.cpu_worker" in modules and "ray" not in modules, "forks import slowly"
        engine.call("sample", PROMPT, 4, SamplingParameters(max_tokens=2))
        copies = (tmp_path / "copies").read_text().split()
        assert copies[0] == str(3 * (len(PROMPT) - 1)), "rows share a prompt, and all compute its last token"
        assert gloo_threads(engine.engine_pid) == 1, "vLLM's groups share a device"
        with pytest.raises(DataError, match=r"temperature is 0\.005, and vLLM would sample at 0\.01"):
            engine.call("sample", PROMPT, 1, SamplingParameters(temperature=0.005))
        ring = Ring(engine, Policy(folder), bucket_bytes=64 << 10)
        ring.join()
        ring.update()
        check_that_a_turn_is_cached_until_the_weights_change(engine, ring)
        ring.update()
        assert ring.agrees()
        living = (tmp_path / "living").read_text().split()
        assert living == ["1"] * 3, "replaced weights leave the memory without garbage collection"
        check_that_a_killed_process_fails_requests_and_checks(engine)


def check_that_a_turn_is_cached_until_the_weights_change(engine: EngineProcess, ring: Ring) -> None:
    """A later turn finds its conversation in the cache."""

    def cached_in_turn(before: Segment | list[int]) -> tuple[Segment, int]:
        cached = engine.call("figures").cached_tokens
        row = engine.call("sample_one", before, SamplingParameters(max_tokens=300), trajectory_id=0, key="turns")
        return row.segments[0], engine.call("figures").cached_tokens - cached

    first, cached = cached_in_turn(list(range(3, 83)))
    assert cached == 0
    turn = first_tokens(first, 300)
    assert cached_in_turn(turn)[1] == 2 * 128, "whole blocks of vLLM's cache on CPUs"
    ring.update()
    assert cached_in_turn(turn)[1] == 0


def check_that_a_killed_process_fails_requests_and_checks(engine: EngineProcess) -> None:
    running = engine.submit("sample", PROMPT, 4, SamplingParameters(max_tokens=200))
    os.kill(engine.engine_pid, signal.SIGKILL)
    with pytest.raises(UnavailableError):
        running.result(30)
    eventually(lambda: engine.call("is_dead"))
    with pytest.raises(UnavailableError):
        engine.call("check")
    with pytest.raises(UnavailableError):
        engine.call("sample", PROMPT, 1, SamplingParameters())


def keep_modules() -> None:
    """Has weights loaded as on GPUs, or for a model whose modules cannot be replaced."""
    from tandem.rollout.vllm import worker_extension

    worker_extension.can_be_replaced = lambda model: False  # type: ignore[assignment]


def pack_all_weights() -> None:
    """Has vLLM make a oneDNN kernel for every weight, as for larger models."""
    from tandem.rollout.vllm import small_weights

    small_weights.MOST_ELEMENTS = 0


@pytest.mark.slow
@pytest.mark.parametrize("prepare", [keep_modules, pack_all_weights])
def test_weights_arrive_in_running_modules_and_in_packed_ones(
    tmp_path: Path, redis_url: str, prepare: Callable[[], None]
) -> None:
    folder = build_tiny_model(tmp_path / "model", hidden=64, ends=False)
    store = redis_store(redis_url, prepare.__name__, "weights")
    arguments = SamplerArguments(CONFIG, str(folder), "float32", max_model_tokens=512, seed=3, group_store=store)
    with EngineProcess(arguments, prepare) as engine:
        ring = Ring(engine, Policy(folder), bucket_bytes=64 << 10)
        ring.join()
        for _ in range(3):
            ring.update()
            assert ring.agrees()


@pytest.mark.slow
def test_only_small_float32_weights_are_multiplied_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import utils

    from tandem.rollout.vllm.small_weights import MOST_ELEMENTS, multiply_small_weights_with_torch

    dispatched = []
    monkeypatch.setattr(utils, "dispatch_cpu_unquantized_gemm", lambda layer, remove_weight: dispatched.append(layer))
    multiply_small_weights_with_torch()
    rows = MOST_ELEMENTS // 64
    weights = [torch.zeros(rows, 64), torch.zeros(rows + 1, 64), torch.zeros(8, 64, dtype=torch.bfloat16)]
    layers = [torch.nn.Module() for _ in weights]
    for layer, weight in zip(layers, weights, strict=True):
        layer.weight = torch.nn.Parameter(weight)
        utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    assert layers[0].cpu_linear is torch.nn.functional.linear
    assert dispatched == layers[1:]


@pytest.mark.slow
def test_an_embedding_is_packed_once_it_is_multiplied_with() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    from tandem.rollout.vllm.packed_embeddings import pack_embeddings_when_used

    process = UnquantizedEmbeddingMethod.process_weights_after_loading
    pack_embeddings_when_used()
    try:
        method, running = UnquantizedEmbeddingMethod(), torch.nn.Module()
        running.weight = torch.nn.Parameter(torch.randn(64, 32))
        method.process_weights_after_loading(running)
        waiting, copy = running.cpu_linear, torch.nn.Module()
        copy.__dict__.update(running.__dict__ | {"_parameters": {"weight": torch.nn.Parameter(torch.randn(64, 32))}})
        method.process_weights_after_loading(copy)
        assert copy.cpu_linear is waiting, "nothing multiplies with it"
        changes = replaced_modules._changes(running, copy)
        running.cpu_linear(torch.randn(3, 32), running.weight, None)
        replaced_modules.replace([(running, changes)])
        assert running.cpu_linear is waiting, "the product between the two packed the weights of before"
        states_BH = torch.randn(3, 32)
        for _ in range(2):
            expected_BV = states_BH @ running.weight.T
            torch.testing.assert_close(running.cpu_linear(states_BH, running.weight, None), expected_BV)
            assert running.cpu_linear is not waiting
            running.weight = torch.nn.Parameter(torch.randn(64, 32))
            method.process_weights_after_loading(running)
    finally:
        UnquantizedEmbeddingMethod.process_weights_after_loading = process


def fail_to_replace() -> None:
    from tandem.rollout.vllm import worker_extension

    def failing(replacements: list[Any]) -> None:
        assert not replacements, "out of memory, half of the layers are replaced"

    worker_extension.replace = failing


@pytest.mark.slow
def test_an_engine_whose_weights_are_not_replaced_as_a_whole_ends(tmp_path: Path, redis_url: str) -> None:
    folder = build_tiny_model(tmp_path / "model", hidden=64, ends=False)
    store = redis_store(redis_url, "halves", "weights")
    arguments = SamplerArguments(CONFIG, str(folder), "float32", max_model_tokens=512, seed=3, group_store=store)
    with EngineProcess(arguments, fail_to_replace) as engine:
        ring = Ring(engine, Policy(folder), bucket_bytes=64 << 10)
        ring.join()
        with pytest.raises(TandemError):
            ring.update()
        eventually(lambda: engine.call("is_dead"))


@pytest.mark.slow
def test_tensor_parallel_workers_each_merge_adapters_into_their_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, redis_url: str
) -> None:
    """Killed workers also leave no shared memory behind."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # otherwise vLLM requires a NUMA node per worker
    folder = build_tiny_model(tmp_path / "model", hidden=64, ends=False)
    config = CONFIG.model_copy(update={"tensor_parallel_size": 2})
    store = redis_store(redis_url, "parallel", "weights")
    arguments = SamplerArguments(config, str(folder), "float32", max_model_tokens=512, seed=3, group_store=store)
    engine = EngineProcess(arguments)
    try:
        ring = AdapterRing(engine, AdapterPolicy(folder))
        ring.join(tensor_parallel_size=2)
        for _ in range(3):
            ring.update()
            assert ring.agrees()
        family = psutil.Process(engine.process.pid).children(recursive=True)
        workers = [process.pid for process in family if "Worker" in process.name()]
        assert [gloo_threads(worker) for worker in workers] == [2, 2], "one of the weight group"
        segments = {segment for process in family for segment in shared_memory(process)}
        assert segments, "the workers exchange tensors there"
    finally:
        engine.kill()
    _, alive = psutil.wait_procs(family, timeout=10.0)
    assert not alive
    remove_leftovers()
    assert [segment for segment in segments if segment.exists()] == []


def gloo_threads(pid: int) -> int:
    """The devices of gloo in a process: each has one thread."""
    names = [(thread / "comm").read_text().strip() for thread in Path(f"/proc/{pid}/task").iterdir()]
    return names.count("gloo_tcp_loop")


def shared_memory(process: psutil.Process) -> set[Path]:
    """The named shared memory segments that a process has mapped."""
    lines = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    return {Path(name) for line in lines for name in line.split()[5:6] if name.startswith("/dev/shm/")}
