"""Settings of weight updates that do not fit one another, or the trainer's."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.protos.errors import ConfigError
from tandem.services.config import Recipe, parse_recipe

RANKS = {"num_ranks": 2}


def recipe(weights: dict[str, Any], trainer: dict[str, Any]) -> Recipe:
    values = {"model": {"path": "model"}, "data": {"train_file": "train.parquet"}, "run": {"run_id": "mine"}}
    return parse_recipe({**values, "weights": weights, "trainer": trainer}, source="recipe.toml")


@pytest.mark.parametrize(
    ("weights", "trainer", "says"),
    [
        ({"encoding": "delta", "backend": "disk"}, {}, 'needs weights.backend "gloo", not "disk"'),
        ({"encoding": "delta"}, {"lora": {}}, 'trainer.lora.broadcast is "adapter"'),
        (
            {"backend": "nccl", "deadline_seconds": 143.0},
            RANKS,
            "all ranks wait for a publication, which may take 301 s",
        ),
        ({"backend": "ipc", "deadline_seconds": 286.0}, RANKS, "lower weights.deadline_seconds (286)"),
    ],
)
def test_settings_that_do_not_fit_are_refused(weights: dict[str, Any], trainer: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(weights, trainer)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("weights", "trainer"),
    [
        ({"backend": "nccl", "deadline_seconds": 142.0}, RANKS),
        ({"backend": "nccl", "deadline_seconds": 142.0}, {"num_nodes": 2}),
        ({"backend": "ipc", "deadline_seconds": 284.0}, RANKS),
        ({"backend": "nccl", "deadline_seconds": 600.0}, {}),
        ({"backend": "gloo", "deadline_seconds": 600.0}, RANKS),
        ({"backend": "nccl", "deadline_seconds": 600.0}, {**RANKS, "collective_timeout_seconds": 1300.0}),
    ],
)
def test_a_publication_that_fits_into_the_deadline_of_collectives_is_accepted(
    weights: dict[str, Any], trainer: dict[str, Any]
) -> None:
    assert recipe(weights, trainer).weights.deadline_seconds == weights["deadline_seconds"]
