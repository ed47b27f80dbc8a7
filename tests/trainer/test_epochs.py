"""Several epochs over a batch, in the real learner."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError
from torch import Tensor

from tandem.protos.types import StepResult, TrajectoryGroup
from tandem.trainer.config import TrainerConfig
from tandem.trainer.learner import Learner
from tandem.trainer.policy_losses.options import loss_models
from tests.support.engine_inputs import equal
from tests.support.learner_rank import all_weights
from tests.support.training_groups import make_batch, make_group

MakeLearner = Callable[..., Learner]

ALGORITHMS: dict[str, Mapping[str, Any]] = {
    "default": {},
    "interpolated proximal log-probs": {"correction": "areal_loglinear"},
    "chosen tokens, rejections": {
        "loss": {"name": "clip_cov", "fraction": 0.2},
        "correction": {"rejections": [{"level": "token", "measure": "k3", "high": 0.5}]},
    },
    "critic": {"advantage": {"name": "gae", "whiten": False}, "critic": {"learning_rate": 1e-2}},
}


def groups_of(version: int) -> list[TrajectoryGroup]:
    return [make_group(index, seed=version, versions=(0, version - 1)) for index in range(2)]


def again(groups: list[TrajectoryGroup]) -> list[TrajectoryGroup]:
    """The same answers to other prompts."""
    return [replace(group, prompt=replace(group.prompt, epoch=1)) for group in groups]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_second_epoch_is_like_a_second_step_with_equal_rows(name: str, make_learner: MakeLearner) -> None:
    """A batch twice in one step each ends with the bits of a batch in two steps, whose second half repeats its first.
    A second batch shows that nothing of the first one stays.
    """
    settings = {**ALGORITHMS[name], "learning_rate": 1e-2, "zero_stage": 0}

    def train(*, epochs: int) -> tuple[dict[str, Tensor], StepResult]:
        learner = make_learner(**settings, epochs_per_batch=epochs)
        for version in (1, 2):
            groups = groups_of(version)
            groups = groups if epochs == 2 else [*groups, *again(groups)]
            result = learner.train(
                learner.prepare(*make_batch(groups, policy_version=version, optimizer_steps=3 - epochs))
            )
        return all_weights(learner), result

    (twice, of_epochs), (halves, of_steps) = train(epochs=2), train(epochs=1)
    assert equal(twice, halves)
    assert of_epochs.optimizer_step == of_steps.optimizer_step == 4
    for figure in ("loss", "grad_norm", "clipped_fraction", "entropy", "behavior_proximal_kl", "learning_rate"):
        assert of_epochs.metrics[figure] == pytest.approx(of_steps.metrics[figure], rel=1e-6), figure
    for figure in ("trained_tokens", "staleness_0/num_loss_tokens", "num_micro_batches"):
        assert of_epochs.metrics[figure] == of_steps.metrics[figure] / 2, "counts are those of an epoch"


@pytest.mark.parametrize("name", loss_models())
def test_a_loss_that_ignores_the_ratio_refuses_several_epochs(name: str) -> None:
    assert TrainerConfig(loss=name).epochs_per_batch == 1
    if name == "reinforce":
        with pytest.raises(ValidationError, match="epochs_per_batch is 2, but loss reinforce ignores how far"):
            TrainerConfig(loss=name, epochs_per_batch=2)
    else:
        TrainerConfig(loss=name, epochs_per_batch=2)


def test_reinforce_accepts_several_epochs_with_the_ratio_as_its_weight() -> None:
    assert TrainerConfig(loss="reinforce", correction="bypass_seq_tis", epochs_per_batch=2).epochs_per_batch == 2


def test_every_epoch_can_be_prevented_and_skips_are_counted(make_learner: MakeLearner) -> None:
    learner = make_learner(epochs_per_batch=3, optimizer_steps_per_batch=2, advantage="dr_grpo")
    batch, by_id = make_batch(groups_of(1), optimizer_steps=2)
    calls: list[int] = []
    learner.train(learner.prepare(batch, by_id), lambda: calls.append(1))
    assert len(calls) == learner.optimizer_step == 6
    rewards = [1e200, 0.0, 1.0, 0.0]  # overflows float32
    result = learner.train(learner.prepare(*make_batch([make_group(0, rewards=rewards)], policy_version=2)))
    assert not result.changed and result.metrics["skipped_steps"] == 3
