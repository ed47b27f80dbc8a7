"""What the autoscaler reads from the lines of metrics.jsonl and from the buffer."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.services.buffer.types import Sampler
from tandem.services.config import Recipe, parse_recipe
from tandem.services.planning.observation import batches_of, queues_of


@pytest.fixture
def recipe() -> Recipe:
    return parse_recipe(
        {
            "run": {"run_id": "r", "groups_per_batch": 4, "staleness_budget": 1},
            "model": {"path": "model"},
            "data": {"train_file": "train.parquet"},
            "trainer": {"evaluate_every": 2},
        }
    )


def line(step: int, **changed: Any) -> dict[str, Any]:
    return {
        "step": step,
        "time": 100.0 + 10.0 * step,
        "seconds_claim": 3.0,
        "seconds_train": 5.0,
        "seconds_publish": 1.5,
        "seconds_total": 10.0,
        "trainer_idle_seconds": 3.0,
        "samplers_acknowledged": 2,
        "sampler_busy_seconds": 15.0 * step,
        "sampler_idle_seconds": 5.0 * step,
        "scorer_busy_seconds": 2.0 * step,
        "staleness_mean": 1.0,
        **changed,
    }


def test_a_batch_says_where_its_time_went(recipe: Recipe) -> None:
    (batch,) = batches_of([line(1), line(2)], recipe)
    assert (batch.step, batch.ended, batch.seconds, batch.samplers) == (2, 120.0, 10.0, 2)
    assert (batch.sampler_busy_seconds, batch.sampler_idle_seconds, batch.scorer_busy_seconds) == (15.0, 5.0, 2.0)
    assert (batch.idle_seconds, batch.paused_seconds, batch.work_seconds) == (3.0, 0.5, 6.5)
    assert not batch.disturbed


def test_a_batch_with_a_pause_is_disturbed(recipe: Recipe) -> None:
    lines = [line(1), line(2), line(3), line(4, seconds_evaluate=4.0, seconds_total=14.0), line(5, seconds_total=15.0)]
    found = batches_of(lines, recipe)
    assert [batch.evaluated for batch in found] == [False, True, False, True], "after version 2 and after version 4"
    assert [batch.paused_seconds for batch in found] == [0.5, 0.5, 4.5, 5.5], "an evaluation, and a checkpoint after it"
    assert [batch.disturbed for batch in found] == [False, True, True, True]
    assert [batch.work_seconds for batch in found] == [6.5] * 4


def test_retrained_batches_do_not_count(recipe: Recipe) -> None:
    again = line(2, replayed=True)
    del again["samplers_acknowledged"], again["seconds_claim"]
    assert [batch.step for batch in batches_of([line(1), again, line(3), line(4)], recipe)] == [4]


def test_queues_count_groups_and_replicas_that_work(recipe: Recipe) -> None:
    counts = {"outstanding": 8, "prompts_waiting": 1, "prompts_leased": 2, "generated_waiting": 3}
    samplers = [
        Sampler("rollout-0", "", "LIVE", 3, 1, 1, True, 1),
        Sampler("rollout-1", "", "LIVE", 3, 1, 1, False, 1),
        Sampler("rollout-2", "", "JOINING", -1, -1, 1, True, 1),
    ]
    silences = {"reward": 0.5, "reward-1": 60.0, "trainer": 0.1, "rollout-0": 0.1}
    found = queues_of(5.0, recipe, counts={**counts, "generated_leased": 1}, samplers=samplers, silences=silences)
    assert (found.samplers, found.scorers) == (1, 1)
    assert (found.credits, found.outstanding, found.unsampled, found.sampling, found.unscored) == (8, 8, 1, 2, 4)
