"""The GPUs, cores and threads that each service of a local run gets."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import pytest

from tandem.services.run import placement
from tandem.services.run.placement import (
    CPU_ENVIRONMENT,
    NARROW,
    ONE_ARENA,
    automatic_threads,
    cpu_environment,
    gpus_wanted,
    place,
    starts_after,
)
from tests.support.processes import run_python
from tests.support.run_inputs import recipe_of

VALUES: dict[str, dict[str, Any]] = {"run": {"run_id": "x"}, "model": {"path": "m"}, "data": {"train_file": "t"}}


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "CUDA_VISIBLE_DEVICES", *CPU_ENVIRONMENT, *ONE_ARENA):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(placement, "gpu_ids", lambda: ())
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2})


def use_gpus(monkeypatch: pytest.MonkeyPatch, *gpus: str) -> None:
    monkeypatch.setattr(placement, "gpu_ids", lambda: gpus)


def test_services_on_cpus_have_one_thread_if_neither_recipe_nor_engine_names_a_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recipe = recipe_of(VALUES)
    for name in ("feed", "reward", "trainer"):
        assert place(recipe, name) == CPU_ENVIRONMENT
    assert "OMP_NUM_THREADS" not in place(recipe, "rollout-0"), "the engine of a single sampler chooses"
    two = recipe_of(VALUES, rollout={"num_replicas": 2})
    assert place(two, "rollout-1").items() >= {**CPU_ENVIRONMENT, **ONE_ARENA}.items()
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert place(recipe, "trainer")["OMP_NUM_THREADS"] == "8", "the user's own value is kept"


def test_trainer_and_samplers_get_the_threads_of_the_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(VALUES, trainer={"num_threads": 3}, rollout={"num_threads": 2})
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    threads = {"trainer": "3", "rollout-0": "2", "rollout-1": "2", "feed": "8"}
    assert {name: place(recipe, name)["OMP_NUM_THREADS"] for name in threads} == threads


def test_processes_of_one_kind_share_the_cores_unless_the_environment_names_a_smaller_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [automatic_threads(number) for number in (0, 1, 2, 3, 4)] == [3, 3, 1, 1, 1]
    assert [automatic_threads(1, hidden_size) for hidden_size in (0, 128, NARROW)] == [3, 1, 3], "0 is unknown"
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert automatic_threads(1) == automatic_threads(1, hidden_size=128) == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert [automatic_threads(number) for number in (1, 3)] == [3, 1], "not more than its share of the cores"


def test_samplers_side_by_side_get_a_core_for_every_worker() -> None:
    recipe = recipe_of(VALUES, rollout={"num_replicas": 2, "tensor_parallel_size": 2})
    assert place(recipe, "rollout-0")["VLLM_CPU_OMP_THREADS_BIND"] == "0|1"
    assert place(recipe, "rollout-1")["VLLM_CPU_OMP_THREADS_BIND"] == "2|0"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in place(recipe, "trainer")


@pytest.mark.parametrize(("cores", "after"), [(2, "rollout-0"), (3, "")])
def test_with_few_cores_the_first_sampler_starts_before_the_others(
    monkeypatch: pytest.MonkeyPatch, cores: int, after: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    recipe = recipe_of(VALUES, rollout={"num_replicas": 2})
    assert starts_after(recipe, "rollout-1") == after
    assert all(starts_after(recipe, name) == "" for name in ("feed", "rollout-0", "reward", "trainer"))


def test_trainer_and_samplers_get_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, "4", "5", "6", "7")
    recipe = recipe_of(VALUES, trainer={"num_ranks": 2}, rollout={"num_replicas": 2}, weights={"backend": "nccl"})
    gpus = {"trainer": "4,5", "rollout-0": "6", "rollout-1": "7", "feed": "", "reward": ""}
    assert {name: place(recipe, name)["CUDA_VISIBLE_DEVICES"] for name in gpus} == gpus
    assert gpus_wanted(recipe) == 4


def test_ipc_shares_the_first_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    use_gpus(monkeypatch, "0", "1")
    recipe = recipe_of(VALUES, weights={"backend": "ipc"})
    assert place(recipe, "trainer") == place(recipe, "rollout-0") == {"CUDA_VISIBLE_DEVICES": "0"}
    assert gpus_wanted(recipe) == 1


def test_gpus_are_the_devices_visible_in_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(placement, "Path", lambda _: tmp_path)
    assert placement.gpu_ids() == ()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert placement.gpu_ids() == ("0", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert placement.gpu_ids() == ("1",)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert placement.gpu_ids() == ()


@pytest.mark.parametrize("name", ["rollout-0", "trainer", "feed"])
def test_only_samplers_have_one_arena_on_any_machine(name: str) -> None:
    arenas = ONE_ARENA if name == "rollout-0" else {}
    assert cpu_environment(name) == {**CPU_ENVIRONMENT, **arenas}
    assert place(recipe_of(VALUES), name).get("MALLOC_ARENA_MAX") == arenas.get("MALLOC_ARENA_MAX")


COUNT_ARENAS = """
import ctypes, sys, threading
from tandem.services.run.placement import set_allocator
set_allocator(sys.argv[1])
held, wait = [], threading.Barrier(5)
def allocate():
    held.append(bytes(100_000))
    wait.wait()
for _ in range(4):
    threading.Thread(target=allocate, daemon=True).start()
wait.wait()
libc = ctypes.CDLL(None)
libc.malloc_info(0, ctypes.c_void_p.in_dll(libc, "stdout"))
libc.fflush(None)
"""


@pytest.mark.parametrize(
    ("name", "variables", "arenas"), [("feed", {}, 5), ("rollout", {}, 1), ("rollout", {"MALLOC_ARENA_MAX": "2"}, 2)]
)
def test_a_sampler_that_runs_already_gets_one_arena_unless_the_user_says_otherwise(
    name: str, variables: dict[str, str], arenas: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("the allocator is not glibc's")
    for other in ("MALLOC_ARENA_TEST", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(other, raising=False)
    done = run_python("-c", COUNT_ARENAS, name, OPENBLAS_NUM_THREADS="1", **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("<heap nr=") == arenas
