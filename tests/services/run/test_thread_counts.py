"""The check of thread counts: what a machine has cores for, and what a run keeps that has begun."""

from __future__ import annotations

import os

import pytest

from tandem.protos.errors import ConfigError
from tandem.services.config import dump_recipe
from tandem.services.run import threads
from tandem.services.run.preflight import check_recipe, check_service
from tandem.services.run.resume import with_automatic_values
from tandem.services.run.threads import check_threads, shared_cores
from tests.support.run_inputs import Values, recipe_of

pytestmark = pytest.mark.usefixtures("plain_machine")


@pytest.mark.parametrize("table", ["trainer", "rollout"])
def test_more_threads_than_cores_are_refused_before_the_run_begins(values: Values, table: str) -> None:
    cores = len(os.sched_getaffinity(0))
    check_recipe(recipe_of(values, **{table: {"num_threads": cores}}), resume=False)
    recipe = recipe_of(values, **{table: {"num_threads": cores + 1}})
    says = f"{table}.num_threads is {cores + 1} and this machine has {cores} cores"
    with pytest.raises(ConfigError, match=says):
        check_recipe(recipe, resume=False)
    with pytest.raises(ConfigError, match=says):
        check_service(recipe, table, 0)
    check_service(recipe, "reward", 0)


@pytest.mark.parametrize(
    ("table", "key"),
    [("trainer", "num_ranks"), ("rollout", "num_replicas"), ("rollout", "tensor_parallel_size")],
)
def test_threads_of_several_workers_are_counted_together(
    values: Values, table: str, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    recipe = recipe_of(values, **{table: {"num_threads": 3, key: 2}})
    says = f"{table}.num_threads is 3 for each of 2 workers, and this machine has 5 cores"
    with pytest.raises(ConfigError, match=says):
        check_recipe(recipe, resume=False)
    if key != "num_replicas":  # a service that is started by itself is one sampler
        with pytest.raises(ConfigError, match=says):
            check_service(recipe, table, 0)
    for fits in ({"num_threads": 2, key: 2}, {"num_threads": 1, key: 6}):
        recipe = recipe_of(values, **{table: fits})
        check_threads(recipe, table, getattr(getattr(recipe, table), key))
    monkeypatch.setattr(threads, "gpu_ids", lambda: ("0", "1"))
    check_threads(recipe_of(values, **{table: {"num_threads": 3, key: 2}}), table, 2)


@pytest.mark.parametrize("table", ["trainer", "rollout"])
def test_a_run_keeps_its_threads_on_a_machine_with_fewer_cores_and_gets_no_others(values: Values, table: str) -> None:
    cores = len(os.sched_getaffinity(0))
    begun = recipe_of(values, **{table: {"num_threads": cores + 1}})
    begun.folder.mkdir(parents=True)
    (begun.folder / "config.json").write_text(dump_recipe(begun))
    with pytest.raises(ConfigError, match=f"{table}.num_threads is {cores + 1}"):
        check_service(begun, table, 0)
    (begun.folder / "batches" / "000001").mkdir(parents=True)
    check_service(begun, table, 0)
    with pytest.raises(ConfigError, match=f"{table}.num_threads is {cores + 2}"):
        check_service(recipe_of(values, **{table: {"num_threads": cores + 2}}), table, 0)


@pytest.mark.parametrize("number", ["2", "8"])
def test_what_auto_stands_for_is_never_refused(values: Values, number: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(3)))
    monkeypatch.setenv("OMP_NUM_THREADS", number)
    recipe = recipe_of(values, trainer={"num_ranks": 2}, rollout={"num_replicas": 4})
    chosen = with_automatic_values(recipe, resume=False)
    assert (chosen.trainer.num_threads, chosen.rollout.num_threads) == (1, 1)
    check_threads(chosen, "trainer", 2)
    check_threads(chosen, "rollout", 4)


def test_a_run_whose_threads_share_cores_says_so(values: Values, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    recipe = recipe_of(values, trainer={"num_threads": 4}, rollout={"num_threads": 2, "num_replicas": 2})
    assert shared_cores(recipe) == {}
    recipe = recipe_of(
        values, trainer={"num_threads": 5}, rollout={"num_threads": 2, "num_replicas": 3, "tensor_parallel_size": 2}
    )
    assert shared_cores(recipe) == {
        "trainer": "trainer.num_threads stays 5: 5 threads share the 4 cores of this machine",
        "rollout": "rollout.num_threads stays 2: 12 threads share the 4 cores of this machine",
    }
    assert shared_cores(recipe_of(values, rollout={"num_threads": 1, "num_replicas": 9})) == {}
    monkeypatch.setattr(threads, "gpu_ids", lambda: ("0",))
    assert shared_cores(recipe) == {}
