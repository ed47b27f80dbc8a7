"""Estimators whose step is a turn: values computed by hand, and what they share with those of answers and tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from torch import Tensor

from tandem.trainer.batch.ragged import spread
from tandem.trainer.estimators.inputs import EstimatorBatch
from tandem.trainer.estimators.options import (
    GaeOptions,
    GrpoOptions,
    ReinforcePlusPlusOptions,
    TurnGaeOptions,
    TurnGrpoOptions,
)
from tandem.trainer.estimators.registry import estimate
from tests.trainer.estimators.test_estimator_laws import CLOSE, batches, many, rows_of, with_scores


def doubles(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@pytest.fixture
def three_rows() -> EstimatorBatch:
    """A group: a row with turns of two tokens and one, one with turns of one token and two, one with a single turn."""
    return EstimatorBatch(
        rewards_N=doubles([0.0, 0.5, 1.0, 0.0, 0.0, 0.5, 0.0, 0.25]),
        lengths_R=torch.tensor([3, 3, 2]),
        groups_R=torch.tensor([7, 7, 7]),
        values_N=doubles([0.2, 0.9, 0.4, 0.1, 0.3, 0.7, 0.0, 0.5]),
        turns_N=torch.tensor([0, 0, 1, 0, 1, 1, 0, 0]),
    )


def test_returns_of_turns_are_compared_with_the_groups_at_the_same_turn(three_rows: EstimatorBatch) -> None:
    """With γ = ½ the returns are 1, ¼, ¼ from the first turn on, and 1, ½ from the second on."""
    advantages_N = estimate(three_rows, TurnGrpoOptions(gamma=0.5)).advantages_N
    first, second = 0.25 * 3**0.5, 0.125**0.5  # standard deviations
    want = [0.5 / first, 0.5 / first, 0.25 / second, -0.25 / first, -0.25 / second, -0.25 / second]
    assert advantages_N.tolist() == pytest.approx([*want, -0.25 / first, -0.25 / first], rel=1e-5)


def test_a_turn_that_no_other_row_has_gets_zero(three_rows: EstimatorBatch) -> None:
    longer = replace(three_rows, turns_N=torch.tensor([0, 1, 2, 0, 1, 1, 0, 0]))
    assert float(estimate(longer, TurnGrpoOptions()).advantages_N[2]) == 0.0


def test_turns_of_other_groups_are_not_compared(three_rows: EstimatorBatch) -> None:
    alone = replace(three_rows, groups_R=torch.tensor([7, 3, 3]))
    advantages_N = estimate(alone, TurnGrpoOptions()).advantages_N
    assert advantages_N.tolist() == pytest.approx([1.5, 1.5, 1.0, *[0.5**0.5, 0.0, 0.0], *[-(0.5**0.5)] * 2], rel=1e-4)


def test_gae_over_turns_takes_the_critics_value_before_a_turn(three_rows: EstimatorBatch) -> None:
    """γ = ½, λ = 0.8. First row: Δ = 0.5 + ½·0.4 − 0.2 and 1 − 0.4. Second: ½·0.3 − 0.1 and 0.5 − 0.3. Third: 0.25."""
    got = estimate(three_rows, TurnGaeOptions(gamma=0.5, lam=0.8, whiten=False))
    assert got.advantages_N.tolist() == pytest.approx([0.74, 0.74, 0.6, 0.13, 0.2, 0.2, 0.25, 0.25])
    assert got.returns_N is not None
    assert got.returns_N.tolist() == pytest.approx([0.94, 0.94, 1.0, 0.23, 0.5, 0.5, 0.25, 0.25])


def test_reinforce_plus_plus_sums_the_rewards_of_later_turns(three_rows: EstimatorBatch) -> None:
    got = estimate(three_rows, ReinforcePlusPlusOptions(gamma=0.5, whiten=False))
    assert got.advantages_N.tolist() == pytest.approx([0.5, 1.0, 1.0, 0.125, 0.25, 0.5, 0.125, 0.25])


@many
@given(batches())
def test_grpo_of_turns_agrees_with_its_definition(batch: EstimatorBatch) -> None:
    assert batch.turns_N is not None
    returns: dict[tuple[int, int], float] = {}
    for row, tokens in enumerate(rows_of(batch)):
        after = 0.0
        for turn in range(int(batch.turns_N[tokens].max()) if len(tokens) else -1, -1, -1):
            here = tokens[batch.turns_N[tokens] == turn]
            after = returns[row, turn] = float(batch.rewards_N[here].sum()) + 0.9 * after
    want = []
    for row, tokens in enumerate(rows_of(batch)):
        for turn in batch.turns_N[tokens].tolist():
            others = [
                value
                for (other, number), value in returns.items()
                if number == turn and batch.groups_R[other] == batch.groups_R[row]
            ]
            mean, deviation = (doubles(others).mean(), doubles(others).std()) if len(others) > 1 else (0.0, 1.0)
            is_alone = len(others) == 1 and int((batch.groups_R == batch.groups_R[row]).sum()) > 1
            want.append(0.0 if is_alone else float((returns[row, turn] - mean) / (deviation + 1e-6)))
    got_N = estimate(batch, TurnGrpoOptions(gamma=0.9)).advantages_N
    torch.testing.assert_close(got_N, doubles(want), rtol=1e-6, atol=1e-6)


@many
@given(batches(shortest=1))
def test_rows_of_one_turn_get_grpo(batch: EstimatorBatch) -> None:
    assert batch.turns_N is not None
    one_turn = replace(batch, turns_N=torch.zeros_like(batch.turns_N))
    got_N = estimate(one_turn, TurnGrpoOptions(gamma=0.5)).advantages_N
    torch.testing.assert_close(got_N, estimate(batch, GrpoOptions()).advantages_N, **CLOSE)


@many
@given(batches(shortest=2))
def test_a_reward_only_at_the_end_of_equally_many_turns_gets_grpo(batch: EstimatorBatch) -> None:
    """Every row has two turns, the second of one token."""
    turns_N = torch.zeros(len(batch.rewards_N), dtype=torch.int64)
    turns_N[batch.lengths_R.cumsum(0) - 1] = 1
    ends = replace(with_scores(batch, batch.scores_R), turns_N=turns_N)
    got_N = estimate(ends, TurnGrpoOptions()).advantages_N
    torch.testing.assert_close(got_N, estimate(ends, GrpoOptions()).advantages_N, **CLOSE)


@many
@given(batches())
def test_turns_of_one_token_get_gae(batch: EstimatorBatch) -> None:
    starts_N = spread(batch.lengths_R.cumsum(0) - batch.lengths_R, batch.lengths_R)
    tokens = replace(batch, turns_N=torch.arange(len(starts_N)) - starts_N)
    got = estimate(tokens, TurnGaeOptions(gamma=0.9, lam=0.8))
    want = estimate(batch, GaeOptions(gamma=0.9, lam=0.8))
    assert got.returns_N is not None and want.returns_N is not None
    torch.testing.assert_close(got.advantages_N, want.advantages_N, **CLOSE)
    torch.testing.assert_close(got.returns_N, want.returns_N, **CLOSE)
