"""Advantage estimators against golden values, analytic examples and bad input."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tandem.protos.errors import DataError
from tandem.trainer.batch.ragged import spread
from tandem.trainer.estimators.inputs import EstimatorBatch
from tandem.trainer.estimators.options import (
    EstimatorOptions,
    GaeOptions,
    GdpoOptions,
    GrpoOptions,
    MaxrlOptions,
    PkpoOptions,
    RlooOptions,
    estimator_models,
)
from tandem.trainer.estimators.registry import estimate
from tests.support.golden_cases import GoldenCase, flatten, golden_cases, unflatten

every_estimator = pytest.mark.parametrize("name", list(estimator_models()))


def options_of(case: GoldenCase) -> EstimatorOptions:
    """Options that reproduce a golden case: the defaults, overridden by its name and `hyper`."""
    name, hyper = case.name.split("/")[1], case.hyper
    values: dict[str, Any] = {}
    if name in ("grpo", "grpo_vectorized"):
        name = "grpo" if hyper["norm_by_std"] else "dr_grpo"
    elif name == "rloo_vectorized":
        name, values = "rloo", {"group_of_one": "zero"}
    elif "norm_by_std" in hyper:
        values["divide_by_std"] = hyper["norm_by_std"]
    values |= {key: hyper[key] for key in ("gamma", "lam", "f_norm", "handle_zero_tail") if key in hyper}
    if hyper.get("weights"):
        values["weights"] = hyper["weights"]
    return estimator_models()[name](**values)


def batch_of(case: GoldenCase) -> EstimatorBatch:
    """The case's tensors as flat columns."""
    inputs, mask = case.inputs, case.inputs["response_mask"]

    def column(name: str) -> Tensor | None:
        return flatten(inputs[name], mask)[0] if name in inputs else None

    rewards_N = column("token_level_rewards")
    num_rows, width = mask.shape
    return EstimatorBatch(
        rewards_N=torch.zeros(int(mask.sum()), dtype=torch.float64) if rewards_N is None else rewards_N,
        lengths_R=mask.long().sum(1),
        groups_R=inputs.get("index", torch.zeros(num_rows, dtype=torch.int64)),
        baselines_R=inputs.get("reward_baselines"),
        components_RC=inputs.get("reward_components"),
        values_N=column("values"),
        logprobs_N=column("old_log_probs"),
        squared_probs_N=column("sum_pi_squared"),
        behavior_weights_N=column("rollout_is_weights") if case.hyper.get("use_is_weights") else None,
        columns_N=torch.arange(width).expand(num_rows, width)[mask.bool()],
    )


def make_batch(scores: list[float], groups: list[int], lengths: list[int] | None = None) -> EstimatorBatch:
    """Rows with the outcome reward on their last token and made-up values in the other columns."""
    lengths_R = torch.tensor(lengths or [2] * len(scores), dtype=torch.int64)
    total = int(lengths_R.sum())
    scores_R = torch.tensor(scores, dtype=torch.float64)
    rewards_N = torch.zeros(total, dtype=torch.float64)
    rewards_N[(lengths_R.cumsum(0) - 1)[lengths_R > 0]] = scores_R[lengths_R > 0]
    generator = torch.Generator().manual_seed(0)
    columns_N = torch.arange(total) - spread(lengths_R.cumsum(0) - lengths_R, lengths_R)
    return EstimatorBatch(
        rewards_N,
        lengths_R,
        torch.tensor(groups, dtype=torch.int64),
        baselines_R=torch.rand(len(scores), generator=generator, dtype=torch.float64),
        components_RC=torch.stack([scores_R, scores_R.square()], 1),
        values_N=torch.rand(total, generator=generator),
        logprobs_N=-torch.rand(total, generator=generator),
        squared_probs_N=torch.rand(total, generator=generator),
        behavior_weights_N=torch.rand(total, generator=generator) + 0.5,
        columns_N=columns_N,
        turns_N=columns_N // 2,
    )


def row_values(batch: EstimatorBatch, options: EstimatorOptions) -> list[float]:
    """The advantage of each row's first token."""
    starts_R = batch.lengths_R.cumsum(0) - batch.lengths_R
    return [float(value) for value in estimate(batch, options).advantages_N[starts_R]]


@pytest.mark.parametrize("case", golden_cases("advantage/"), ids=lambda case: case.name)
def test_advantages_agree_with_golden_values(case: GoldenCase) -> None:
    mask = case.inputs["response_mask"]
    got = estimate(batch_of(case), options_of(case))
    case.check("advantages", unflatten(got.advantages_N, mask))
    if "returns" in case.outputs:
        assert got.returns_N is not None
        case.check("returns", unflatten(got.returns_N, mask))
    else:
        assert got.returns_N is None
    assert got.advantages_N.dtype == torch.float64


def test_critic_lam_changes_only_the_returns() -> None:
    batch = make_batch([1.0, 0.0, 0.5], [0, 0, 1], [5, 1, 70])
    plain = estimate(batch, GaeOptions(gamma=0.9, lam=0.7))
    decoupled = estimate(batch, GaeOptions(gamma=0.9, lam=0.7, critic_lam=1.0))
    other = estimate(batch, GaeOptions(gamma=0.9, lam=1.0))
    assert torch.equal(plain.advantages_N, decoupled.advantages_N)
    assert decoupled.returns_N is not None and other.returns_N is not None
    torch.testing.assert_close(decoupled.returns_N, other.returns_N)


def test_grpo_divides_by_the_standard_deviation_of_the_batch() -> None:
    got = row_values(make_batch([1.0, 0.0, 3.0, 3.0], [0, 0, 1, 1]), GrpoOptions(std_over="batch"))
    std = float(torch.tensor([1.0, 0.0, 3.0, 3.0], dtype=torch.float64).std())
    assert got == pytest.approx([0.5 / (std + 1e-6), -0.5 / (std + 1e-6), 0.0, 0.0])


def test_maxrl_divides_by_the_pass_rate_and_refuses_negative_rewards() -> None:
    batch = make_batch([1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0], [0, 0, 0, 0, 1, 1, 2, 2])
    assert row_values(batch, MaxrlOptions()) == pytest.approx([3.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0, 0.0])
    with pytest.raises(DataError, match=r"row 2 scores -0\.5"):
        estimate(make_batch([1.0, 0.0, -0.5], [0, 0, 0]), MaxrlOptions())


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_pkpo_agrees_with_the_sum_over_all_subsets(k: int) -> None:
    scores = [0.3, 1.0, 0.0, 0.3, 0.7, 0.9, 0.1, 0.1, 0.5, 1.0, 0.0]
    groups = [7, 7, 2, 7, 2, 7, 2, 7, 2, 2, 2]
    want = [0.0] * len(scores)
    for label in (2, 7):
        rows = [row for row, group in enumerate(groups) if group == label]
        for subset in combinations(rows, k):
            for row in subset:
                others = max(scores[other] for other in subset if other != row)
                gain = max(scores[row], others) - others
                want[row] += len(rows) * gain / math.comb(len(rows), k)
    assert row_values(make_batch(scores, groups), PkpoOptions(k=k)) == pytest.approx(want)


SINGLES = {
    "grpo": 0.75,
    "dr_grpo": 0.75,
    "gpg": 0.75,
    "rloo": 0.75,
    "opo": 0.75,
    "gdpo": 0.75 + 0.75**2,
    "reinforce_plus_plus_baseline": 0.75,
    "turn_grpo": 0.75,
    "optimal_token_baseline": 0.75,
    "tir_optimal_token_baseline": 0.75,
}


@pytest.mark.parametrize("name", [name for name, known in estimator_models().items() if known.compares_answers])
def test_a_group_of_one_is_defined_or_refused(name: str) -> None:
    batch = make_batch([0.75], [3])
    model = estimator_models()[name]
    options = model(whiten=False) if "whiten" in model.model_fields else model()
    if name in SINGLES:
        assert row_values(batch, options) == pytest.approx([SINGLES[name]], rel=1e-5)
    else:
        with pytest.raises(DataError, match=r"row 0 \(group 3\): a group of 1"):
            estimate(batch, options)


def test_rloo_can_give_a_group_of_one_zero() -> None:
    assert row_values(make_batch([0.75, 1.0, 0.0], [0, 1, 1]), RlooOptions(group_of_one="zero")) == [0.0, 1.0, -1.0]


def test_a_group_smaller_than_k_is_refused() -> None:
    assert PkpoOptions(k=3).min_group_size == 3
    with pytest.raises(DataError, match=r"row 1 \(group 9\): a group of 2, but pkpo compares at least 3"):
        estimate(make_batch([1.0] * 5, [4, 9, 4, 9, 4]), PkpoOptions(k=3))


@pytest.mark.parametrize("num_rows", [0, 4])
@every_estimator
def test_no_tokens_give_empty_advantages(name: str, num_rows: int) -> None:
    got = estimate(make_batch([1.0] * num_rows, [0] * num_rows, [0] * num_rows), estimator_models()[name]())
    assert got.advantages_N.shape == (0,)
    assert got.returns_N is None or got.returns_N.shape == (0,)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@every_estimator
def test_a_reward_that_is_not_finite_names_its_row(name: str, bad: float) -> None:
    with pytest.raises(DataError, match=r"row 2 \(group 5\): a reward is not finite"):
        estimate(make_batch([1.0, 0.0, bad, 1.0], [5, 5, 5, 5], [3, 0, 2, 1]), estimator_models()[name]())


@pytest.mark.parametrize(
    ("name", "column", "what"),
    [
        ("gae", "values_N", "value of the critic"),
        ("turn_gae", "values_N", "value of the critic"),
        ("remax", "baselines_R", "greedy baseline"),
        ("gdpo", "components_RC", "reward component"),
        ("optimal_token_baseline", "logprobs_N", "proximal log-prob"),
        ("tir_optimal_token_baseline", "squared_probs_N", "Σπ²"),
        ("tir_optimal_token_baseline", "behavior_weights_N", "behavior weight"),
    ],
)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_other_columns_that_are_not_finite_name_their_row(name: str, column: str, what: str, bad: float) -> None:
    batch = make_batch([1.0, 0.0, 0.5], [0, 0, 1], [2, 2, 2])
    getattr(batch, column)[2 if column.endswith(("R", "RC")) else 4] = bad
    with pytest.raises(DataError, match=rf"row 2 \(group 1\): a {what} is not finite"):
        estimate(batch, estimator_models()[name]())
    # An estimator that does not read the column accepts it.
    estimate(batch, GrpoOptions())


def test_an_advantage_that_overflows_is_refused() -> None:
    with pytest.raises(DataError, match=r"row 0 \(group 0\): an advantage is not finite"):
        estimate(make_batch([1e308, -1e308], [0, 0]), RlooOptions())


def test_gdpo_requires_one_weight_per_component() -> None:
    with pytest.raises(DataError, match="3 weights for 2 reward components"):
        estimate(make_batch([1.0, 0.0], [0, 0]), GdpoOptions(weights=(1.0, 1.0, 1.0)))


OPTIONAL = {
    "values": "values_N",
    "baselines": "baselines_R",
    "components": "components_RC",
    "logprobs": "logprobs_N",
    "squared_probs": "squared_probs_N",
    "columns": "columns_N",
    "turns": "turns_N",
}


@every_estimator
def test_an_estimator_reads_only_its_declared_columns(name: str) -> None:
    options = estimator_models()[name]()
    batch = make_batch([1.0, 0.0, 0.5, 0.25], [0] * 4, [3, 2, 3, 3])
    unread = {field: None for need, field in OPTIONAL.items() if need not in options.needs}
    want_N = estimate(batch, options).advantages_N
    assert torch.equal(estimate(replace(batch, **unread), options).advantages_N, want_N)
    for need in options.needs:
        with pytest.raises(AssertionError, match=f"{name} needs {need}"):
            estimate(replace(batch, **{OPTIONAL[need]: None}), options)
    first_N = torch.zeros_like(batch.rewards_N)
    first_N[batch.lengths_R.cumsum(0) - batch.lengths_R] = batch.scores_R
    moved_N = estimate(replace(batch, rewards_N=first_N), options).advantages_N
    assert torch.equal(moved_N, want_N) != options.reads_places
    weighed = replace(batch, behavior_weights_N=1.0 + torch.arange(len(want_N), dtype=torch.float64))
    assert torch.equal(estimate(weighed, options).advantages_N, want_N) != options.weighs_tokens


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        ("gae", {"gama": 1.0}, "gama"),
        ("gae", {"gamma": 1.5}, "gamma"),
        ("gae", {"lam": math.nan}, "lam"),
        ("pkpo", {"k": 1}, "k"),
        ("gpg", {"f_norm": 0.0}, "f_norm"),
    ],
)
def test_invalid_options_are_refused(name: str, values: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError, match=rf"\n{field}\n"):
        estimator_models()[name].model_validate(values)
