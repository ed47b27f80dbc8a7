"""Properties of advantages for every batch: row order, group names, shifts, scales and sums, checked against naive
loops.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tandem.trainer.batch.ragged import spread
from tandem.trainer.estimators.inputs import EstimatorBatch
from tandem.trainer.estimators.options import estimator_models
from tandem.trainer.estimators.registry import Estimate, estimate
from tandem.trainer.estimators.scans import BLOCK, discounted_sums, running_sums

CLOSE = {"rtol": 1e-9, "atol": 1e-9}
FAR_FROM_ZERO = 1e4
"""Scores spread this far leave the 1e-6 beside a standard deviation without effect."""

many = settings(max_examples=25, deadline=None)
names = st.sampled_from(list(estimator_models()))
seeds = st.integers(0, 2**31)


@st.composite
def batches(draw: st.DrawFn, *, smallest_group: int = 4, shortest: int = 0) -> EstimatorBatch:
    """Groups of different sizes in shuffled row order. Rewards of 0, ¼ … 1 make ties and zero variance common."""
    sizes = draw(st.lists(st.integers(smallest_group, 7), min_size=1, max_size=4))
    labels = torch.tensor([label * 3 - 1 for label, size in enumerate(sizes) for _ in range(size)])
    lengths_R = torch.tensor(
        draw(st.lists(st.integers(shortest, 2 * BLOCK + 2), min_size=len(labels), max_size=len(labels)))
    )
    generator = torch.Generator().manual_seed(draw(seeds))
    total = int(lengths_R.sum())

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    steps_N = torch.randint(1, 4, (total,), generator=generator)
    begins_N = steps_N > 1
    begins_N[(lengths_R.cumsum(0) - lengths_R)[lengths_R > 0]] = True
    return EstimatorBatch(
        rewards_N=(uniform(total) * 4).round() / 4,
        lengths_R=lengths_R,
        groups_R=labels[torch.randperm(len(labels), generator=generator)],
        baselines_R=uniform(len(labels)),
        components_RC=uniform(len(labels), 2),
        values_N=uniform(total),
        logprobs_N=-uniform(total),
        squared_probs_N=uniform(total),
        behavior_weights_N=uniform(total) + 0.5,
        columns_N=running_sums(steps_N.double(), lengths_R).long(),
        turns_N=running_sums(begins_N.double(), lengths_R).long() - 1,
    )


def rows_of(batch: EstimatorBatch) -> list[Tensor]:
    """The numbers of each row's tokens."""
    return list(torch.arange(len(batch.rewards_N)).split(batch.lengths_R.tolist()))


def reorder(batch: EstimatorBatch, order_R: Tensor) -> tuple[EstimatorBatch, Tensor]:
    """The batch with its rows in another order, and the old index of each token."""
    rows = rows_of(batch)
    where_N = torch.cat([rows[row] for row in order_R.tolist()])
    columns: dict[str, Any] = {}
    for name, value in vars(batch).items():
        if isinstance(value, Tensor) and name.endswith(("_N", "_R", "_RC")) and name != "scores_R":
            columns[name] = value[where_N if name.endswith("_N") else order_R]
    return EstimatorBatch(**columns), where_N


def with_scores(batch: EstimatorBatch, scores_R: Tensor) -> EstimatorBatch:
    """The batch with other row scores, each on the row's last token."""
    rewards_N = torch.zeros_like(batch.rewards_N)
    rewards_N[batch.lengths_R.cumsum(0) - 1] = scores_R
    return replace(batch, rewards_N=rewards_N, components_RC=torch.stack([scores_R, scores_R * 2], 1))


def run(batch: EstimatorBatch, name: str, **values: Any) -> Estimate:
    return estimate(batch, estimator_models()[name](**values))


def row_advantages(batch: EstimatorBatch, name: str, **values: Any) -> Tensor:
    """The advantage of each row, for an estimator that gives all tokens of a row the same. Rows must not be empty."""
    advantages_N = run(batch, name, **values).advantages_N
    first_R = advantages_N[batch.lengths_R.cumsum(0) - batch.lengths_R]
    assert torch.equal(advantages_N, spread(first_R, batch.lengths_R))
    return first_R


@many
@given(batches(), names, seeds)
def test_the_order_of_rows_and_the_names_of_groups_do_not_matter(batch: EstimatorBatch, name: str, seed: int) -> None:
    order_R = torch.randperm(len(batch.lengths_R), generator=torch.Generator().manual_seed(seed))
    other, where_N = reorder(batch, order_R)
    want, got = run(batch, name), run(replace(other, groups_R=7 - 5 * other.groups_R), name)
    torch.testing.assert_close(got.advantages_N, want.advantages_N[where_N], **CLOSE)
    if want.returns_N is not None:
        assert got.returns_N is not None
        torch.testing.assert_close(got.returns_N, want.returns_N[where_N], **CLOSE)


@many
@given(batches(shortest=1), seeds)
@pytest.mark.parametrize(
    "name", ["grpo", "dr_grpo", "grpo_passk", "rloo", "opo", "pkpo", "reinforce_plus_plus_baseline", "gdpo"]
)
def test_adding_a_constant_to_the_rewards_of_a_group_does_not_matter(
    name: str, batch: EstimatorBatch, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shifts_P = torch.randint(-40, 40, (len(batch.groups.sizes_P),), generator=generator).double() / 4
    plain = with_scores(batch, batch.scores_R)
    shifted = with_scores(batch, batch.scores_R + shifts_P[batch.groups.of_row_R])
    torch.testing.assert_close(row_advantages(shifted, name), row_advantages(plain, name), rtol=1e-6, atol=1e-8)


@many
@given(batches(shortest=1), st.sampled_from([0.25, 3.0, 16.0]))
@pytest.mark.parametrize(
    ("name", "values", "degree"),
    [
        ("dr_grpo", {}, 1),
        ("rloo", {}, 1),
        ("opo", {}, 1),
        ("gpg", {}, 1),
        ("pkpo", {}, 1),
        ("grpo_passk", {"divide_by_std": False}, 1),
        ("gdpo", {"divide_by_std": False, "whiten": False}, 1),
        ("reinforce_plus_plus_baseline", {"whiten": False}, 1),
        ("reinforce_plus_plus", {"whiten": False, "gamma": 0.9}, 1),
        ("gae", {"whiten": False, "gamma": 0.9, "lam": 0.8}, 1),
        ("turn_gae", {"whiten": False, "gamma": 0.9, "lam": 0.8}, 1),
        ("remax", {}, 1),
        ("optimal_token_baseline", {}, 1),
        ("tir_optimal_token_baseline", {}, 1),
        ("maxrl", {}, 0),
        ("grpo", {}, 0),
        ("grpo", {"std_over": "batch"}, 0),
        ("grpo_passk", {}, 0),
        ("gdpo", {}, 0),
        ("reinforce_plus_plus_baseline", {}, 0),
        ("reinforce_plus_plus", {}, 0),
        ("gae", {}, 0),
        ("turn_gae", {}, 0),
    ],
)
def test_scaling_rewards_scales_advantages_or_cancels(
    name: str, values: dict[str, Any], degree: int, batch: EstimatorBatch, scale: float
) -> None:
    assert batch.components_RC is not None and batch.baselines_R is not None and batch.values_N is not None

    def times(factor: float) -> Tensor:
        assert batch.components_RC is not None and batch.baselines_R is not None and batch.values_N is not None
        other = replace(
            batch,
            rewards_N=batch.rewards_N * factor,
            components_RC=batch.components_RC * factor,
            baselines_R=batch.baselines_R * factor,
            values_N=batch.values_N * factor,
        )
        return run(other, name, **values).advantages_N

    base = FAR_FROM_ZERO if degree == 0 else 1.0
    torch.testing.assert_close(times(base * scale), times(base) * scale**degree, rtol=1e-6, atol=1e-6)


@many
@given(batches(shortest=1))
@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "gpg", "maxrl", "opo"])
def test_advantages_of_a_group_sum_to_zero(name: str, batch: EstimatorBatch) -> None:
    """Over its rows; for opo, which weighs rows by their length, over its tokens."""
    advantages_R = row_advantages(batch, name)
    sums_P = batch.groups.sums(advantages_R * batch.lengths_R if name == "opo" else advantages_R)
    torch.testing.assert_close(sums_P, torch.zeros_like(sums_P), **CLOSE)


@many
@given(batches(shortest=1))
@pytest.mark.parametrize("name", ["gae", "turn_gae", "gdpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_whitened_advantages_have_mean_zero(name: str, batch: EstimatorBatch) -> None:
    advantages_N = run(batch, name).advantages_N
    torch.testing.assert_close(advantages_N.mean(), torch.zeros_like(advantages_N.mean()), rtol=0.0, atol=1e-9)
    assert float(advantages_N.std()) <= 1.0 + 1e-9


@many
@given(batches(shortest=1), st.sampled_from([0.0, 0.1, 1.0, 1e9]))
@pytest.mark.parametrize(
    "name",
    ["grpo", "dr_grpo", "grpo_passk", "gpg", "maxrl", "rloo", "opo", "pkpo", "gdpo", "reinforce_plus_plus_baseline"],
)
def test_a_group_without_variance_gets_exactly_zero(name: str, batch: EstimatorBatch, score: float) -> None:
    same = with_scores(batch, torch.full_like(batch.scores_R, score))
    assert not run(same, name).advantages_N.any()


@many
@given(batches(), st.booleans())
@pytest.mark.parametrize("name", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_the_token_baseline_agrees_with_its_definition(name: str, batch: EstimatorBatch, zero_tail: bool) -> None:
    assert batch.logprobs_N is not None and batch.squared_probs_N is not None
    assert batch.behavior_weights_N is not None and batch.columns_N is not None
    energy_N = (1 - 2 * batch.logprobs_N.exp() + batch.squared_probs_N) * batch.behavior_weights_N.square()
    rows = rows_of(batch)
    to_go = [batch.rewards_N[row].flip(0).cumsum(0).flip(0) for row in rows]
    weight = [energy_N[row].cumsum(0) for row in rows]
    place = [batch.columns_N[row] if name[0] == "o" else torch.arange(len(row)) for row in rows]
    want = []
    for i in range(len(rows)):
        mates = [j for j in range(len(rows)) if batch.groups_R[j] == batch.groups_R[i]]
        counted = [j for j in mates if name[0] == "o" or len(rows[j])]
        others = max((len(rows[j]) for j in mates if j != i), default=0)
        for rank, t in enumerate(place[i].tolist()):
            here = [(to_go[j][place[j] == t], weight[j][place[j] == t]) for j in mates]
            baseline = sum(float((g * w).sum()) for g, w in here) / (sum(float(w.sum()) for _, w in here) + 1e-8)
            if len(counted) == 1 or (zero_tail and len(rows[i]) > others and t >= others):
                baseline = 0.0
            want.append(float(to_go[i][rank]) - baseline)
    got_N = run(batch, name, handle_zero_tail=zero_tail).advantages_N
    torch.testing.assert_close(got_N, torch.tensor(want, dtype=torch.float64), rtol=1e-7, atol=1e-7)


@many
@given(st.lists(st.integers(0, 40 * BLOCK), min_size=1, max_size=6), st.sampled_from([0.0, 0.5, 0.999, 1.0]), seeds)
def test_sums_within_rows_agree_with_a_loop(lengths: list[int], decay: float, seed: int) -> None:
    lengths_R = torch.tensor(lengths)
    values_N = torch.randn(sum(lengths), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    discounted, running = [], []
    for row in values_N.split(lengths):
        carry, back = 0.0, []
        for value in reversed(row.tolist()):
            carry = value + decay * carry
            back.append(carry)
        discounted += back[::-1]
        running += row.cumsum(0).tolist()
    want_N = torch.tensor(discounted, dtype=torch.float64)
    torch.testing.assert_close(discounted_sums(values_N, lengths_R, decay), want_N, **CLOSE)
    torch.testing.assert_close(running_sums(values_N, lengths_R), torch.tensor(running, dtype=torch.float64), **CLOSE)


@many
@given(batches(shortest=1))
def test_a_huge_reward_does_not_reduce_the_precision_of_another_row(batch: EstimatorBatch) -> None:
    rewards_N = batch.rewards_N.clone()
    rewards_N[: int(batch.lengths_R[0])] = 1e18
    rest = slice(int(batch.lengths_R[0]), None)
    for name in ("remax", "reinforce_plus_plus"):
        want, got = run(batch, name).returns_N, run(replace(batch, rewards_N=rewards_N), name).returns_N
        assert want is not None and got is not None
        torch.testing.assert_close(got[rest], want[rest], **CLOSE)


@many
@given(batches(), names)
def test_estimators_do_not_modify_their_inputs(batch: EstimatorBatch, name: str) -> None:
    before = {key: value.clone() for key, value in vars(batch).items() if isinstance(value, Tensor)}
    run(batch, name)
    for key, value in before.items():
        assert torch.equal(getattr(batch, key), value), key
