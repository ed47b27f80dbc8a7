"""Consecutive batches whose optimizer steps are skipped for non-finite gradients end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.protos.errors import TrainingError
from tandem.protos.types import TrajectoryGroup
from tests.support.trainer_ring import P, lines_of, make_recipe, make_run, put_scored, train
from tests.support.training_groups import make_group

GOOD, BAD = (0.0, 1.0, 1.0, 0.0), (1e200, 0.0, 1.0, 0.0)  # beyond float32


def groups(*bad: bool) -> list[TrajectoryGroup]:
    """Groups of one batch per entry; in a bad batch the second group's reward makes its step's gradient overflow."""
    rewards = [BAD if of_bad and place == P - 1 else GOOD for of_bad in bad for place in range(P)]
    return [make_group(index, rewards=those) for index, those in enumerate(rewards)]


def skipping_run(folder: Path, url: str, bad: tuple[bool, ...], **trainer: Any) -> list[dict[str, Any]]:
    """Trains the batches, with two bad ones in a row as the limit; returns the metrics of those that did not end the
    run.
    """
    recipe = make_recipe(
        folder,
        run={"total_batches": len(bad)},
        trainer={"max_skipped_batches": 2, "optimizer_steps_per_batch": P, **trainer},
    )
    put_scored(make_run(url, recipe), groups(*bad))
    try:
        assert train(recipe, url)
    finally:
        lines = lines_of(recipe)
    return lines


def test_batches_that_lose_some_of_their_steps_end_the_run(tmp_path: Path, redis_url: str) -> None:
    with pytest.raises(TrainingError, match=r"2 batches in a row .* the last for version 4"):
        skipping_run(tmp_path, redis_url, (True, False, True, True, False), advantage="dr_grpo")


def test_a_good_batch_resets_the_count(tmp_path: Path, redis_url: str) -> None:
    lines = skipping_run(tmp_path, redis_url, (True, False, True), advantage="dr_grpo")
    assert [(line["skipped_steps"], line["optimizer_step"]) for line in lines] == [(1, 1), (0, 3), (1, 4)]


def test_a_critic_that_always_skips_ends_the_run_during_its_warm_up(tmp_path: Path, redis_url: str) -> None:
    with pytest.raises(TrainingError, match=r"2 batches in a row .* the last for version 2"):
        skipping_run(tmp_path, redis_url, (True, True, True), advantage="gae", critic={"warmup_batches": 3})
