"""Rates are found again in the folder of a run that was simulated with them, and `tandem plan` uses them."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.protos.errors import UserError
from tandem.services.cli import app
from tandem.services.config import Recipe, parse_recipe
from tandem.services.planning.calibration import LEAST_BATCHES, WARM_UP_BATCHES, measure
from tandem.services.planning.proposals import candidates, predict, resized, with_split
from tandem.services.planning.rates import GroupSize, Rates
from tandem.trainer.batch.record import prune_records
from tests.support.simulated_run import write_simulated_run

RATES = Rates(
    step_seconds=0.01,
    row_seconds=0.0005,
    batch_seconds=0.5,
    token_seconds=0.001,
    publish_seconds=0.1,
    stall_seconds=0.02,
    score_seconds=0.01,
    trainer_processors=0.75,
    sampler_processors=1.25,
)
DICE = random.Random(0)
GROUPS = [GroupSize(20, tuple(DICE.randint(10, 200) for _ in range(4))) for _ in range(400)]


def recipe_in(folder: Path, budget: int, **trainer: int) -> Recipe:
    return parse_recipe(
        {
            "run": {"run_id": "r", "folder": str(folder), "groups_per_batch": 4, "staleness_budget": budget},
            "model": {"path": "model"},
            "data": {"train_file": "train.parquet"},
            "rollout": {"samples_per_prompt": 4, "max_groups_in_flight": 8},
            "trainer": trainer,
        }
    )


@pytest.mark.parametrize("budget", [0, 1, 2])
def test_rates_are_found_again(tmp_path: Path, budget: int) -> None:
    """A synchronous run tells a step's constant part from that of its rows; others give predictions nearly as good."""
    recipe = recipe_in(tmp_path / "run", budget)
    rates = replace(RATES, publication_seconds=0.2)
    found = measure(write_simulated_run(recipe, rates, GROUPS, 60))
    assert found.rates.batch_seconds == pytest.approx(RATES.batch_seconds, rel=0.05)
    assert found.rates.token_seconds == pytest.approx(RATES.token_seconds, rel=0.05)
    assert (found.rates.publish_seconds, found.rates.stall_seconds) == pytest.approx((0.1, 0.02))
    assert found.rates.publication_seconds == pytest.approx(0.2)
    assert found.rates.score_seconds == pytest.approx(0.01)
    assert (found.rates.trainer_processors, found.rates.sampler_processors) == pytest.approx((0.75, 1.25))
    assert found.processors == 2.0
    if budget == 0:
        step = (found.rates.step_seconds, found.rates.row_seconds)
        assert step == pytest.approx((RATES.step_seconds, RATES.row_seconds), rel=1e-3)
    for other in (0, 1, 2):
        predicted = predict(found, recipe_in(tmp_path, other)).steps_per_minute
        true = predict(replace(found, rates=rates, groups=tuple(GROUPS)), recipe_in(tmp_path, other)).steps_per_minute
        assert predicted == pytest.approx(true, rel=0.01 if budget == 0 else 0.1)


def test_pauses_are_found_again(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path / "run", 0, evaluate_every=2, checkpoint_every=5)
    rates = replace(RATES, evaluation_seconds=3.0, output_seconds=7.0)
    found = measure(write_simulated_run(recipe, rates, GROUPS, 60))
    assert (found.rates.evaluation_seconds, found.rates.output_seconds) == pytest.approx((3.0, 7.0))
    assert found.rates.batch_seconds == pytest.approx(RATES.batch_seconds, rel=0.05)
    assert predict(found, recipe).steps_per_minute == pytest.approx(found.steps_per_minute, rel=0.05)


def test_a_prompt_that_its_answers_share_counts_once(tmp_path: Path) -> None:
    shared = [DICE.randint(100, 900) for _ in GROUPS]
    groups = [GroupSize(5 + one, size.answer_tokens, one) for one, size in zip(shared, GROUPS, strict=True)]
    found = measure(write_simulated_run(recipe_in(tmp_path / "run", 0), RATES, groups, 60))
    assert found.rates.token_seconds == pytest.approx(RATES.token_seconds, rel=0.05)
    assert set(found.groups[:4]) == set(groups[4 * WARM_UP_BATCHES : 4 * WARM_UP_BATCHES + 4])
    (fewer,) = resized([GroupSize(503, (10, 20, 30, 40), 500)], 2, 200)
    assert fewer.trained_tokens == 500 + 2 * 3 + 10 + 20


def test_a_run_that_keeps_its_last_batches_is_measured_by_those(tmp_path: Path) -> None:
    folder = write_simulated_run(recipe_in(tmp_path / "run", 0), RATES, GROUPS, 60)
    prune_records(folder, 30)
    found = measure(folder)
    assert found.num_batches == 30 - WARM_UP_BATCHES
    assert found.rates.batch_seconds == pytest.approx(RATES.batch_seconds, rel=0.05)


def test_a_short_run_is_refused(tmp_path: Path) -> None:
    folder = write_simulated_run(recipe_in(tmp_path / "run", 1), RATES, GROUPS, LEAST_BATCHES + WARM_UP_BATCHES - 1)
    with pytest.raises(UserError, match="10 batches are too few to measure rates; run at least 11"):
        measure(folder)


def test_sizes_follow_the_recipe() -> None:
    assert resized([GroupSize(5, (10, 50))], 3, 40) == [GroupSize(5, (10, 40, 10))]


def test_the_split_follows_the_rates(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path / "run", 2)
    measured = measure(write_simulated_run(recipe, RATES, GROUPS, 30))
    slow_trainer = replace(measured, rates=replace(measured.rates, token_seconds=0.01))
    slow_samplers = replace(measured, rates=replace(measured.rates, step_seconds=0.1))
    ranks = [candidates(one, recipe, 8)[0].ranks for one in (slow_samplers, measured, slow_trainer)]
    assert ranks == sorted(ranks) and ranks[0] < ranks[-1]
    found = candidates(measured, recipe, 8)
    assert all(one.gpus <= 8 and one.ranks >= 1 and one.samplers >= 1 for one in found)
    fastest = max(one.prediction.steps_per_minute for one in found)
    assert found[0].prediction.steps_per_minute >= 0.98 * fastest
    assert with_split(recipe, 2, 4, 1).rollout.max_groups_in_flight == 2  # 2·4 groups for four samplers
    wide = recipe.model_copy(update={"rollout": recipe.rollout.model_copy(update={"tensor_parallel_size": 4})})
    assert {one.width for one in candidates(measured, wide, 10)} <= {4, 8}
    with pytest.raises(UserError, match="4 GPUs are too few: one trainer rank and one sampler of 4 need 5"):
        candidates(measured, wide, 4)


def test_the_command_prints_splits_and_asks_for_a_measured_run(tmp_path: Path) -> None:
    recipe = recipe_in(tmp_path / "run", 1)
    folder = str(write_simulated_run(recipe, RATES, GROUPS, 30))
    command = ["plan", f"{folder}/config.json", "--gpus", "8"]
    done = CliRunner().invoke(app, [*command, "--from", folder], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert "ranks  samplers  GPUs each  steps/min" in done.output
    assert "The first is" in done.output and "Assumed: twice the trainer ranks" in done.output
    assert f"tandem run {folder}/config.json trainer.num_ranks=" in done.output
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "needs measured rates" in refused.output and "--from runs/measured" in refused.output
