"""Which faults come when."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tandem.services.chaos.schedule import DISK, KINDS, REDIS, SUPERVISOR, Fault, Kind, schedule, services_of
from tandem.services.config import Recipe
from tests.support.run_inputs import recipe_of, small_values

SERVICES = ["feed", "rollout-0", "rollout-1", "reward", "trainer"]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    values = small_values(tmp_path)
    return recipe_of(values, run={"total_batches": 100, "staleness_budget": 2}, rollout={"num_replicas": 2})


def drawn(recipe: Recipe, seed: int = 7, kinds: tuple[Kind, ...] = KINDS, own_redis: bool = True) -> list[Fault]:
    return schedule(recipe, 120, seed, kinds, own_redis=own_redis)


def test_the_same_seed_draws_the_same_faults_and_another_seed_draws_others(recipe: Recipe) -> None:
    assert drawn(recipe) == drawn(recipe) != drawn(recipe, seed=8)


def test_every_kind_comes_equally_often_and_every_target_of_a_kind(recipe: Recipe) -> None:
    faults = drawn(recipe)
    assert services_of(recipe) == SERVICES
    assert Counter(fault.kind for fault in faults) == dict.fromkeys(KINDS, 20)
    targets = {kind: Counter(fault.target for fault in faults if fault.kind == kind) for kind in KINDS}
    assert set(targets["kill"]) == {*SERVICES, REDIS, SUPERVISOR} and set(targets["stop"]) == {*SERVICES, REDIS}
    assert targets["cut"] == targets["slow"] == dict.fromkeys(SERVICES, 4)
    assert set(targets["disk"]) == {DISK} and set(targets["redis-loss"]) == {REDIS}
    assert max(targets["kill"].values()) - min(targets["kill"].values()) <= 1


def test_faults_come_in_order_over_the_batches_and_leave_a_quarter_for_late_ones(recipe: Recipe) -> None:
    versions = [fault.version for fault in drawn(recipe)]
    assert versions == sorted(versions) and versions[0] == 1 and versions[-1] == 75
    assert [fault.number for fault in drawn(recipe)] == list(range(1, 121))


def test_a_process_is_stopped_for_5_to_20_seconds_and_killed_at_once(recipe: Recipe) -> None:
    seconds = {kind: [fault.seconds for fault in drawn(recipe) if fault.kind == kind] for kind in KINDS}
    assert 5.0 <= min(seconds["stop"]) < max(seconds["stop"]) <= 20.0
    assert set(seconds["kill"]) == set(seconds["redis-loss"]) == {0.0}


def test_only_samplers_and_trainer_lose_a_process_below_them(recipe: Recipe) -> None:
    below = {fault.target for fault in drawn(recipe, kinds=("kill",)) if fault.below}
    assert below == {"rollout-0", "rollout-1", "trainer"}


def test_environment_services_are_hit_where_the_recipe_has_them(recipe: Recipe) -> None:
    environment = {"path": "a:B", "service": True, "num_replicas": 2}
    served = recipe.model_copy(update={"environment": recipe.environment.model_copy(update=environment)})
    names = {"environments-0", "environments-1"}
    assert services_of(served) == [*SERVICES[:3], *sorted(names), *SERVICES[3:]]
    for kind in ("kill", "stop", "cut", "slow"):
        assert names < {fault.target for fault in drawn(served, kinds=(kind,))}
    assert names < {fault.target for fault in drawn(served, kinds=("kill",)) if fault.below}


def test_an_external_redis_is_neither_killed_nor_stopped(recipe: Recipe) -> None:
    faults = drawn(recipe, kinds=("kill", "stop", "cut"), own_redis=False)
    assert REDIS not in {fault.target for fault in faults}
