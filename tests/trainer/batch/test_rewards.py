"""From rewards to advantages: the greedy answer is shaped by the same rules as the rows compared with it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tandem.protos.errors import DataError
from tandem.protos.types import TrainBatch
from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.batch.columns import BatchColumns
from tandem.trainer.batch.layout import BatchLayout
from tandem.trainer.batch.rewards import Targets, learning_targets
from tests.support.training_groups import make_batch, make_group

MAX_TOKENS = 12


def targets_of(batch: TrainBatch, **settings: object) -> tuple[BatchLayout, Targets]:
    layout = BatchLayout.of(batch, rank=0)
    config = AlgorithmConfig(advantage="remax", **settings)  # type: ignore[arg-type]
    targets = learning_targets(
        layout,
        batch.headers,
        BatchColumns(),
        config,
        components={},
        reward_kl_coefficient=0.0,
        max_response_tokens=MAX_TOKENS,
        seed=0,
    )
    return layout, targets


def test_rewards_are_compared_with_the_greedy_answers_of_their_own_group() -> None:
    groups = [
        make_group(0, num_samples=2, rewards=(1.0, 0.25, 0.5), baseline=True),
        make_group(1, num_samples=3, rewards=(0.0, None, 2.0, -1.0), baseline=True, num_segments=2),
    ]
    batch, _ = make_batch(groups)
    layout, targets = targets_of(batch)
    per_row = torch.tensor([0.5, -0.25, 1.0, 3.0]).repeat_interleave(layout.lengths_R)
    torch.testing.assert_close(targets.advantages_N, per_row)


def test_clips_and_penalties_also_apply_to_the_greedy_answer() -> None:
    batch, _ = make_batch([make_group(0, num_samples=3, rewards=(2.0, 1.0, 0.0, 5.0), baseline=True, num_segments=2)])
    lengths = [
        sum(header.num_loss_tokens for header in batch.headers if header.trajectory_id == number) for number in range(4)
    ]
    layout, targets = targets_of(
        batch, selection={"reward_clip": [0.0, 1.0], "overlong_penalty": {"buffer_tokens": 12}}
    )
    shaped = [
        min(reward, 1.0) - min(length, 12) / 12 for reward, length in zip((2.0, 1.0, 0.0, 5.0), lengths, strict=True)
    ]
    expected_R = torch.tensor(shaped[:3]) - shaped[3]
    torch.testing.assert_close(targets.advantages_N, expected_R.repeat_interleave(layout.lengths_R))


def test_a_group_without_its_greedy_answer_is_refused() -> None:
    whole, _ = make_batch([make_group(0, baseline=True), make_group(1)])
    with pytest.raises(DataError, match="group 0-1 has no scored greedy answer"):
        targets_of(whole)
    unscored = replace(
        whole, headers=tuple(replace(h, reward=None) if h.role == "baseline" else h for h in whole.headers)
    )
    with pytest.raises(DataError, match="group 0-0 has no scored greedy answer"):
        targets_of(unscored)
