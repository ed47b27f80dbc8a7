"""Recipes that are gsm8k.toml with another algorithm alone: a learner trains two batches with the recipe's settings.

tests/system/test_system_recipes.py runs the others as a whole.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tandem.services.config import load_recipe
from tandem.trainer.learner import Learner
from tests.project.test_examples import BASED_RECIPES, WITHOUT_CLIP, differs_in_its_algorithm_alone
from tests.support.algorithm_groups import groups_of, plain_policy
from tests.support.training_groups import make_batch

FILES = [file for file in BASED_RECIPES if differs_in_its_algorithm_alone(file)]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_with_another_algorithm_trains_two_batches(file: Path, model: Path) -> None:
    config = load_recipe(file, [f"model.path={model}", "trainer.dtype=float32"]).trainer
    num_steps = min(config.optimizer_steps_per_batch, 2)
    learner = Learner(config, model_path=str(model), total_batches=2, seed=0, max_response_tokens=12)
    try:
        for version in (1, 2):
            before = {name: each.detach().clone() for name, each in learner._model.named_parameters()}
            groups = groups_of(version, plain_policy(model))
            batch, by_id = make_batch(groups, policy_version=version, optimizer_steps=num_steps)
            metrics = learner.train(learner.prepare(batch, by_id)).metrics
            assert learner.optimizer_step == version * num_steps and metrics["skipped_steps"] == 0
            assert math.isfinite(metrics["loss"])
            assert metrics["grad_norm"] > 0 and metrics["advantage_abs_mean"] > 0 and metrics["trained_tokens"] > 0
            assert ("clipped_fraction" in metrics) == (config.loss.name not in WITHOUT_CLIP)
            assert not {"reward_kl", "reference_kl", "value_loss"} & metrics.keys()
            assert any(not torch.equal(each, before[name]) for name, each in learner._model.named_parameters())
    finally:
        learner.close()
