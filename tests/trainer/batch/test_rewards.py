"""From rewards to advantages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tandem.protos.errors import DataError
from tandem.protos.types import TrajectoryGroup
from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.batch.columns import BatchColumns
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.rewards import Targets, explained_variance, learning_targets, reward_components
from tests.support.training_groups import make_batch, make_group

RETURNS = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)


def targets_of(
    groups: list[TrajectoryGroup], settings: dict[str, object], start: BatchColumns | None = None
) -> tuple[BatchLayout, Targets]:
    batch, by_id = make_batch(groups)
    layout = BatchLayout.of(batch, rank=0)
    targets = learning_targets(
        layout,
        batch.headers,
        start or BatchColumns(),
        AlgorithmConfig(**settings),  # type: ignore[arg-type]
        components=reward_components(by_id),
        reward_kl_coefficient=0.0,
        max_response_tokens=12,
        seed=0,
    )
    return layout, targets


@pytest.mark.parametrize("num_segments", [(1, 1, 1, 1), (3, 3, 3, 3), (5, 1, 1, 2)])
@pytest.mark.parametrize(("name", "scale"), [("dr_grpo", 1.0), ("grpo", 0.5 + 1e-6)])
def test_segments_of_a_trajectory_share_one_advantage_and_the_group_counts_it_once(
    name: str, scale: float, num_segments: Sequence[int]
) -> None:
    """The rewards 1, 0, 0, 0 have the mean ¼ and the standard deviation ½, however many segments an episode has."""
    groups = [make_group(0, rewards=[1.0, 0.0, 0.0, 0.0], num_segments=count) for count in num_segments]
    rows = tuple(group.rows[number] for number, group in enumerate(groups))
    layout, targets = targets_of([replace(groups[0], rows=rows)], {"advantage": name})
    assert tuple(layout.segments_R.tolist()) == num_segments
    by_row = targets.advantages_N.split(layout.lengths_R.tolist())
    wanted = [0.75 / scale, *[-0.25 / scale] * 3]
    for row, want in zip(by_row, wanted, strict=True):
        torch.testing.assert_close(row, torch.full_like(row, want))


@pytest.mark.parametrize(("name", "scale"), [("dr_grpo", 1.0), ("grpo", 0.5 + 1e-6)])
def test_baselines_and_unscored_rows_are_not_trajectories(name: str, scale: float) -> None:
    """The rewards 1, 0, ½ have the mean ½ and the standard deviation ½; a row without a reward is in neither."""
    group = make_group(0, num_samples=4, rewards=[1.0, None, 0.0, 0.5], baseline=True)
    layout, targets = targets_of([group], {"advantage": name})
    assert layout.trajectories == (("0-0", 0), ("0-0", 2), ("0-0", 3))
    firsts = [float(row[0]) for row in targets.advantages_N.split(layout.lengths_R.tolist())]
    assert firsts == pytest.approx([0.5 / scale, -0.5 / scale, 0.0])


def test_rewards_are_compared_with_the_greedy_answers_of_their_own_group() -> None:
    groups = [
        make_group(0, num_samples=2, rewards=(1.0, 0.25, 0.5), baseline=True),
        make_group(1, num_samples=3, rewards=(0.0, None, 2.0, -1.0), baseline=True, num_segments=2),
    ]
    layout, targets = targets_of(groups, {"advantage": "remax"})
    per_row = torch.tensor([0.5, -0.25, 1.0, 3.0]).repeat_interleave(layout.lengths_R)
    torch.testing.assert_close(targets.advantages_N, per_row)


def test_clips_and_penalties_also_apply_to_the_greedy_answer() -> None:
    rewards = (2.0, 1.0, 0.0, 5.0)
    group = make_group(0, num_samples=3, rewards=rewards, baseline=True, num_segments=2)
    selection = {"reward_clip": [0.0, 1.0], "overlong_penalty": {"buffer_tokens": 12}}
    layout, targets = targets_of([group], {"advantage": "remax", "selection": selection})
    lengths = [sum(one.num_loss_tokens for one in row.trajectory.segments) for row in group.scored_rows]
    shaped = [min(reward, 1.0) - min(length, 12) / 12 for reward, length in zip(rewards, lengths, strict=True)]
    expected_R = torch.tensor(shaped[:3]) - shaped[3]
    torch.testing.assert_close(targets.advantages_N, expected_R.repeat_interleave(layout.lengths_R))


def test_a_group_without_its_greedy_answer_is_refused() -> None:
    groups = [make_group(0, baseline=True), make_group(1)]
    with pytest.raises(DataError, match="group 0-1 has no scored greedy answer"):
        targets_of(groups, {"advantage": "remax"})
    *policy, greedy = groups[0].rows
    unscored = replace(groups[0], rows=(*policy, replace(greedy, reward=None, unscored_reason="timeout")))
    with pytest.raises(DataError, match="group 0-0 has no scored greedy answer"):
        targets_of([unscored, groups[1]], {"advantage": "remax"})


PLACES = {"advantage": {"name": "reinforce_plus_plus", "whiten": False}}
"""An estimator that reads where a reward fell: the advantage is what is still to come."""


def earned_at_once(group: TrajectoryGroup, amounts: Sequence[float]) -> BatchColumns:
    """Assigns the given part of each trajectory's reward to its first token."""
    layout, _ = targets_of([group], {})
    earned_N = torch.zeros(layout.num_tokens)
    earned_N[layout.lengths_R.cumsum(0) - layout.lengths_R] = torch.tensor(amounts)
    return BatchColumns(token_rewards_N=earned_N)


def test_token_rewards_are_part_of_the_reward_and_not_added_to_it() -> None:
    group = make_group(0, num_samples=1, rewards=[1.0], max_sampled=6)
    layout, targets = targets_of([group], PLACES, earned_at_once(group, [0.25]))
    assert targets.advantages_N.tolist() == pytest.approx([1.0, *[0.75] * (layout.num_tokens - 1)])


def test_trajectories_are_ranked_by_their_total_reward() -> None:
    """Filtration ignores which token a reward is on: the first and third trajectory are equally good, the second is
    worst.
    """
    group = make_group(0, rewards=[1.0, 0.25, 1.0, 0.5])
    for settings in ({}, PLACES):
        filtered = {**settings, "selection": {"filtration": {"method": "best_worst"}}}
        _, targets = targets_of([group], filtered, earned_at_once(group, [0.75, 2.0, 0.0, 0.5]))
        assert targets.counts_R.tolist() == [1.0, 2.0, 1.0, 0.0]
        assert targets.figures["zero_variance_groups"] == 0
    group = make_group(0, rewards=[0.5] * 4)
    _, targets = targets_of([group], PLACES, earned_at_once(group, [0.5, 0.0, 2.0, -1.0]))
    assert targets.figures["zero_variance_groups"] == 1


def test_clip_and_penalty_apply_to_the_total_and_go_to_the_last_token() -> None:
    """Rewards of earlier tokens stay. The last token gets the rest of the clipped total."""
    group = make_group(0, num_samples=3, rewards=[2.0, 0.25, -3.0])
    earned = [1.5, 0.25, 0.5]
    shaped = {"reward_clip": [-1.0, 1.0], "overlong_penalty": {"buffer_tokens": 12}}
    layout, targets = targets_of([group], {**PLACES, "selection": shaped}, earned_at_once(group, earned))
    lengths = layout.lengths_R.tolist()
    assert min(lengths) >= 2
    for row_N, clipped, length, first in zip(
        targets.advantages_N.split(lengths), [1.0, 0.25, -1.0], lengths, earned, strict=True
    ):
        total = clipped - length / 12
        assert row_N.tolist() == pytest.approx([total, *[total - first] * (length - 1)])


def test_advantages_are_clipped_per_token() -> None:
    group = make_group(0, num_samples=2, rewards=[1.0, -1.0])
    settings = {**PLACES, "selection": {"advantage_clip": 0.5}}
    layout, targets = targets_of([group], settings, earned_at_once(group, [0.75, 0.0]))
    good_N, bad_N = targets.advantages_N.split(layout.lengths_R.tolist())
    assert good_N.tolist() == pytest.approx([0.5, *[0.25] * (len(good_N) - 1)])
    assert bad_N.tolist() == pytest.approx([-0.5] * len(bad_N))


def test_a_missing_component_is_named() -> None:
    group = make_group(0, rewards=[1.0, 0.0, 0.5, 0.5])
    with pytest.raises(DataError, match="return a dict"):
        targets_of([group], {"advantage": "gdpo"})
    rows = tuple(
        replace(row, breakdown={"right": row.reward or 0.0} if number else {"right": 1.0, "format": 1.0})
        for number, row in enumerate(group.scored_rows)
    )
    with pytest.raises(DataError, match="trajectory 1: its reward lacks the component format"):
        targets_of([replace(group, rows=rows)], {"advantage": "gdpo"})


def test_rows_that_selection_drops_have_no_weight() -> None:
    group = make_group(0, rewards=[1.0, 0.0, 0.5, 0.5])
    rows = list(group.scored_rows)
    rows[1] = replace(rows[1], trajectory=replace(rows[1].trajectory, finish_reason="length"))
    settings = {"selection": {"overlong_filter": True, "filtration": {"method": "best_worst"}}}
    _, targets = targets_of([replace(group, rows=tuple(rows))], settings)
    assert targets.counts_R.tolist() == [2.0, 0.0, 0.0, 0.0]


def test_of_all_finish_reasons_only_length_is_overlong() -> None:
    group = make_group(0, rewards=[1.0, 0.0, 0.5, 0.5])
    rows = tuple(
        replace(row, trajectory=replace(row.trajectory, finish_reason=reason))
        for row, reason in zip(group.scored_rows, ("stop", "length", "abort", "error"), strict=True)
    )
    _, targets = targets_of([replace(group, rows=rows)], {"selection": {"overlong_filter": True}})
    assert targets.counts_R.tolist() == [1.0, 0.0, 1.0, 1.0]


def test_a_reward_that_is_not_finite_is_refused_before_it_is_clipped() -> None:
    group = make_group(0, num_samples=2, rewards=[1.0, math.inf])
    with pytest.raises(DataError, match="finite"):
        targets_of([group], {"selection": {"reward_clip": [0.0, 1.0]}})


def test_equal_rewards_are_counted() -> None:
    groups = [
        make_group(0, rewards=[1.0, 1.0], num_samples=2),
        make_group(1, rewards=[1.0, 0.0], num_samples=2),
        make_group(2, rewards=[1.0], num_samples=1),
        make_group(3, rewards=[0.5, None], num_samples=2),
    ]
    assert targets_of(groups, {})[1].figures["zero_variance_groups"] == 1


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (RETURNS, 1.0),
        (RETURNS + 7.0, 1.0),  # a constant error explains all of the variance
        (torch.full_like(RETURNS, 5.0), 0.0),
        (2.0 * RETURNS, 0.0),
        (-RETURNS, -3.0),
    ],
)
def test_explained_variance_compares_errors_with_the_variance_of_the_returns(
    values: torch.Tensor, expected: float
) -> None:
    assert explained_variance(values, RETURNS) == pytest.approx(expected)


def test_explained_variance_is_undefined_for_constant_returns() -> None:
    assert math.isnan(explained_variance(RETURNS, torch.ones_like(RETURNS)))
