"""What the services of a run ask of a Ray cluster, and the line that says what it lacks."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.services.launchers.ray_bundles import Bundle, bundle_of, lack_of_room
from tests.support.run_inputs import recipe_of

VALUES: dict[str, dict[str, Any]] = {"run": {"run_id": "x"}, "model": {"path": "m"}, "data": {"train_file": "t"}}


def test_every_worker_and_rank_gets_a_gpu_where_there_are_any() -> None:
    recipe = recipe_of(VALUES, rollout={"tensor_parallel_size": 2}, trainer={"num_ranks": 4})
    with_gpus = {name: bundle_of(recipe, name, has_gpus=True) for name in ("rollout-1", "trainer", "reward", "feed")}
    assert {name: bundle.gpus for name, bundle in with_gpus.items()} == {
        "rollout-1": 2.0,
        "trainer": 4.0,
        "reward": 0.0,
        "feed": 0.0,
    }
    assert with_gpus["rollout-1"].resources() == {"CPU": 2.0, "GPU": 2.0}


def test_a_small_run_fits_on_two_cores_without_gpus() -> None:
    recipe = recipe_of(VALUES, rollout={"num_replicas": 2})
    wanted = {name: bundle_of(recipe, name, has_gpus=False) for name in ("trainer-0", "rollout-0", "rollout-1", "feed")}
    assert all(set(bundle.resources()) == {"CPU"} for bundle in wanted.values())
    assert lack_of_room(wanted, [Bundle(2.0)]) == ""


SAMPLERS = {f"rollout-{index}": Bundle(1.0, 1.0) for index in range(3)}
TRAINER = {"trainer-0": Bundle(4.0, 4.0)}


@pytest.mark.parametrize(
    ("wanted", "machines", "told"),
    [
        (SAMPLERS, [Bundle(8.0, 2.0)], "the run wants 3 samplers of 1 GPU each; the cluster has 2 GPUs free"),
        (
            TRAINER | SAMPLERS,
            [Bundle(8.0, 3.0), Bundle(8.0, 5.0)],
            "",
        ),
        (
            TRAINER,
            [Bundle(8.0, 2.0), Bundle(8.0, 2.0)],
            "the run wants 1 trainer of 4 GPUs; the cluster has 4 GPUs free on 2 machines (2, 2)",
        ),
        (SAMPLERS, [Bundle(2.0, 3.0)], "the run wants 3 samplers of 1 CPU each; the cluster has 2 CPU free"),
        ({"feed": Bundle(0.1)}, [Bundle(0.0)], "the run wants 1 feed of 0.1 CPU; the cluster has 0 CPU free"),
        (SAMPLERS, [], "the run wants 3 samplers of 1 GPU each; the cluster has 0 GPUs free"),
        (
            SAMPLERS | {"feed": Bundle(1.0)},
            [Bundle(8.0, 1.0)],
            "the run wants 3 samplers of 1 GPU each; the cluster has 1 GPU free",
        ),
    ],
)
def test_a_lack_of_room_is_one_sentence(wanted: dict[str, Bundle], machines: list[Bundle], told: str) -> None:
    assert lack_of_room(wanted, machines) == told


def test_parts_of_a_core_add_up_as_ray_counts_them() -> None:
    assert lack_of_room({f"rollout-{index}": Bundle(0.1) for index in range(10)}, [Bundle(1.0)]) == ""
