"""Group-relative advantages."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from protos.codec import group_headers
from tests.golden_cases import GoldenCase, golden_cases
from tests.training_groups import make_group
from trainer.advantages import batch_advantages, group_advantages, num_zero_variance_groups


@pytest.mark.parametrize("case", golden_cases("advantage/grpo/"), ids=lambda case: case.name)
def test_agrees_with_golden_values(case: GoldenCase) -> None:
    rewards_B = case.inputs["token_level_rewards"].sum(1).numpy()
    index_B = case.inputs["index"].numpy()
    advantages_B = np.zeros_like(rewards_B)
    for group in np.unique(index_B):
        rows = index_B == group
        advantages_B[rows] = group_advantages(rewards_B[rows], divide_by_std=case.hyper["norm_by_std"])
    case.check("advantages", torch.from_numpy(advantages_B)[:, None] * case.inputs["response_mask"])


def test_a_group_of_one_keeps_its_reward() -> None:
    assert group_advantages(np.array([0.75]), divide_by_std=False).tolist() == [0.75]
    assert group_advantages(np.array([0.75]), divide_by_std=True) == pytest.approx(0.75, rel=1e-5)


def test_equal_rewards_give_zero() -> None:
    assert group_advantages(np.full(4, 0.3), divide_by_std=True) == pytest.approx(np.zeros(4), abs=1e-9)


def test_baselines_and_unscored_rows_do_not_enter() -> None:
    group = make_group(0, num_samples=4, rewards=[1.0, None, 0.0, 0.5], baseline=True)
    advantages = batch_advantages(group_headers(group), "dr_grpo")
    assert advantages == {
        ("0-0", 0): pytest.approx(0.5),
        ("0-0", 2): pytest.approx(-0.5),
        ("0-0", 3): pytest.approx(0.0),
    }


def test_segments_of_a_trajectory_share_one_advantage_and_count_once() -> None:
    one = batch_advantages(group_headers(make_group(0, rewards=[1.0, 0.0, 0.0, 0.0])), "grpo")
    three = batch_advantages(group_headers(make_group(0, rewards=[1.0, 0.0, 0.0, 0.0], num_segments=3)), "grpo")
    assert one == three


def test_zero_variance_groups_are_counted_but_groups_of_one_are_not() -> None:
    groups = [
        make_group(0, rewards=[1.0, 1.0], num_samples=2),
        make_group(1, rewards=[1.0, 0.0], num_samples=2),
        make_group(2, rewards=[1.0], num_samples=1),
        make_group(3, rewards=[0.5, None], num_samples=2),
    ]
    assert num_zero_variance_groups([header for group in groups for header in group_headers(group)]) == 1
