"""The layout of a batch's loss tokens, and the reward processing before the estimator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from tandem.protos.errors import DataError
from tandem.protos.types import TrajectoryGroup
from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.batch.columns import BatchColumns
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.micro_batch import rank_micro_batches
from tandem.trainer.batch.rewards import Targets, learning_targets, reward_components
from tests.support.training_groups import make_batch, make_group

CPU = torch.device("cpu")


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


@pytest.mark.parametrize("world_size", [1, 3])
def test_every_token_has_one_place_for_any_split_into_micro_batches(world_size: int) -> None:
    groups = [make_group(i, num_segments=1 + i % 2, baseline=True, rewards=[1.0, None, 0.0, 0.5]) for i in range(5)]
    batch, by_id = make_batch(groups, world_size=world_size, tokens_per_micro_batch=40, optimizer_steps=2)
    ids_N: list[np.ndarray] = []
    for group in groups:
        for row in group.scored_rows:
            if row.trajectory.role == "policy" and row.reward is not None:
                ids_N += [one.ids[one.loss_mask.astype(bool)] for one in row.trajectory.segments]
    wanted = np.concatenate(ids_N)
    found = np.full(len(wanted), -1)
    for rank in range(world_size):
        layout = BatchLayout.of(batch, rank=rank)
        assert layout.num_tokens == len(wanted) == int(layout.lengths_S.sum())
        for step, cells in enumerate(rank_micro_batches(batch, by_id, rank=rank, device=CPU)):
            for number, cell in enumerate(cells):
                places = layout.place_of(step, number)
                assert len(places) == int(cell.lengths_B.sum()) and (found[places] == -1).all()
                found[places] = cell.target_N
                assert set(places.tolist()) <= set(layout.tokens_of(step)[0].tolist())
    assert (found == wanted).all()


def test_columns_of_one_rank_survive_a_round_trip() -> None:
    batch, by_id = make_batch([make_group(i) for i in range(3)], tokens_per_micro_batch=40)
    layout = BatchLayout.of(batch, rank=0)
    (cells,) = rank_micro_batches(batch, by_id, rank=0, device=CPU)
    parts = {(0, number): cell.behavior_logprobs_N for number, cell in enumerate(cells)}
    column_N = layout.gather(parts, dtype=torch.float32, device=CPU)
    assert all(torch.equal(column_N[layout.place_of(*cell)], values_N) for cell, values_N in parts.items())


def test_segments_of_a_trajectory_share_one_advantage_and_the_group_counts_it_once() -> None:
    rewards = [1.0, 0.0, 0.0, 0.0]
    for segments in (1, 3):
        layout, targets = targets_of([make_group(0, rewards=rewards, num_segments=segments)], {"advantage": "dr_grpo"})
        by_row = targets.advantages_N.split(layout.lengths_R.tolist())
        assert [set(row.tolist()) for row in by_row] == [{0.75}, {-0.25}, {-0.25}, {-0.25}]


def test_baselines_and_unscored_rows_are_not_trajectories() -> None:
    group = make_group(0, num_samples=4, rewards=[1.0, None, 0.0, 0.5], baseline=True)
    layout, targets = targets_of([group], {"advantage": "dr_grpo"})
    assert layout.trajectories == (("0-0", 0), ("0-0", 2), ("0-0", 3))
    firsts = [float(row[0]) for row in targets.advantages_N.split(layout.lengths_R.tolist())]
    assert firsts == pytest.approx([0.5, -0.5, 0.0])


def test_remax_uses_the_greedy_answer_as_its_baseline() -> None:
    group = make_group(0, num_samples=2, rewards=[1.0, 0.0], baseline=True)
    greedy = group.scored_rows[-1]
    group = replace(group, rows=(*group.rows[:-1], replace(greedy, reward=0.25)))
    layout, targets = targets_of([group], {"advantage": "remax"})
    assert [float(row[0]) for row in targets.advantages_N.split(layout.lengths_R.tolist())] == [0.75, -0.25]
    with pytest.raises(DataError, match="no scored greedy answer"):
        targets_of([make_group(0, num_samples=2, rewards=[1.0, 0.0])], {"advantage": "remax"})


def test_token_rewards_are_part_of_the_reward_and_not_added_to_it() -> None:
    group = make_group(0, num_samples=1, rewards=[1.0], max_sampled=6)
    layout, _ = targets_of([group], {})
    earned_N = torch.zeros(layout.num_tokens)
    earned_N[0] = 0.25
    settings = {"advantage": {"name": "reinforce_plus_plus", "whiten": False}}
    _, targets = targets_of([group], settings, BatchColumns(token_rewards_N=earned_N))
    assert float(targets.advantages_N[0]) == pytest.approx(1.0)
    assert targets.advantages_N[1:].tolist() == pytest.approx([0.75] * (layout.num_tokens - 1))


PLACES = {"advantage": {"name": "reinforce_plus_plus", "whiten": False}}
"""An estimator that reads where a reward fell: the advantage is what is still to come."""


def earned_at_once(group: TrajectoryGroup, amounts: Sequence[float]) -> BatchColumns:
    """Assigns the given part of each trajectory's reward to its first token."""
    layout, _ = targets_of([group], {})
    earned_N = torch.zeros(layout.num_tokens)
    earned_N[layout.lengths_R.cumsum(0) - layout.lengths_R] = torch.tensor(amounts)
    return BatchColumns(token_rewards_N=earned_N)


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


def test_equal_rewards_are_counted() -> None:
    groups = [
        make_group(0, rewards=[1.0, 1.0], num_samples=2),
        make_group(1, rewards=[1.0, 0.0], num_samples=2),
        make_group(2, rewards=[1.0], num_samples=1),
        make_group(3, rewards=[0.5, None], num_samples=2),
    ]
    assert targets_of(groups, {})[1].figures["zero_variance_groups"] == 1
