"""Recipes that are gsm8k.toml with another algorithm alone: a learner trains two batches with the recipe's settings.

Of the others, tests/system/test_system_recipes.py runs every one as a whole.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tandem.services.config import load_recipe
from tandem.trainer.learner import Learner
from tests.project.test_examples import BASED_RECIPES, differs_in_its_algorithm_alone
from tests.support.algorithm_groups import groups_of, plain_policy
from tests.support.training_groups import make_batch

FILES = [file for file in BASED_RECIPES if differs_in_its_algorithm_alone(file)]
WITHOUT_CLIP = ("reinforce", "sapo", "dro", "kl_cov")


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_with_another_algorithm_trains_two_batches(file: Path, model: Path) -> None:
    recipe = load_recipe(file, [f"model.path={model}", "trainer.dtype=float32"])
    num_steps = min(recipe.trainer.optimizer_steps_per_batch, 2)
    config = recipe.trainer.model_copy(update={"optimizer_steps_per_batch": num_steps})
    learner = Learner(config, model_path=str(model), total_batches=2, seed=0, max_response_tokens=12)
    try:
        for version in (1, 2):
            before = {name: each.detach().clone() for name, each in learner._model.named_parameters()}
            batch, by_id = make_batch(groups_of(version, plain_policy(model)), policy_version=version)
            metrics = learner.train(learner.prepare(batch, by_id)).metrics
            assert math.isfinite(metrics["loss"]) and metrics["skipped_steps"] == 0
            assert metrics["grad_norm"] > 0 and metrics["advantage_abs_mean"] > 0 and metrics["trained_tokens"] > 0
            assert ("clipped_fraction" in metrics) == (config.loss.name not in WITHOUT_CLIP)
            assert not {"reward_kl", "reference_kl", "value_loss"} & metrics.keys()
            assert any(not torch.equal(each, before[name]) for name, each in learner._model.named_parameters())
    finally:
        learner.close()
