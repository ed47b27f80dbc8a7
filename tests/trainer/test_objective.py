"""The loss of an optimizer step, also the critic's: golden values, formulas in float64, and non-finite numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tandem.trainer import learner as learner_module
from tandem.trainer import objective as objective_module
from tandem.trainer.algorithm import AlgorithmConfig
from tandem.trainer.batch.columns import BatchColumns
from tandem.trainer.learner import Learner
from tandem.trainer.models.critic import clipped_value_loss
from tandem.trainer.off_policy.proximal import loglinear_proximal
from tandem.trainer.policy_losses.covariance import clip_cov, select_clip_cov
from tandem.trainer.policy_losses.inputs import LossTokens
from tandem.trainer.policy_losses.registry import PolicyLoss
from tests.support.golden_cases import GoldenCase, flatten, golden_cases, unflatten
from tests.support.learner_rank import all_weights
from tests.support.made_up_batch import MadeUpBatch, Outcome
from tests.support.training_groups import make_batch, make_group
from tests.trainer.test_aggregation import golden_shares

BETA, BONUS = 0.3, 0.05
KL_AND_BONUS: Mapping[str, Any] = {"kl": {"loss": {"coefficient": BETA}}, "entropy_coefficient": BONUS}
PLAIN_CLIP = {"name": "clipped_surrogate", "clip_low": 0.2, "clip_high": 0.28, "dual_clip": 0.0}


@pytest.fixture
def batch() -> MadeUpBatch:
    return make_made_up()


def make_made_up(num_steps: int = 1) -> MadeUpBatch:
    """Two groups of three answers for each optimizer step, with values and returns."""
    groups = [make_group(number, num_samples=3, versions=(0, 2)) for number in range(2 * num_steps)]
    batch = MadeUpBatch.of(groups, num_steps=num_steps, distance=0.5)
    values_N, returns_N = 0.4 * torch.randn(2, batch.layout.num_tokens, generator=torch.Generator().manual_seed(0))
    return replace(batch, start=replace(batch.start, values_N=values_N)).with_columns(returns_N=2 * returns_N.double())


def doubles(batch: MadeUpBatch) -> list[Tensor]:
    """(current, proximal, behavior, reference, advantages) in float64."""
    start = batch.start
    columns = (batch.current_N, start.proximal_N, start.behavior_N, start.reference_N, batch.targets.advantages_N)
    return [column_N.double() for column_N in columns if column_N is not None]


def loss_with_kl_and_entropy(
    batch: MadeUpBatch, surrogate_N: Tensor, slope_N: Tensor, weights_N: Tensor
) -> tuple[Tensor, Tensor]:
    """(loss, derivative by log π_current) of every token: surrogate · weight + β·k3 − bonus · entropy."""
    current_N, _, _, reference_N, _ = doubles(batch)
    difference_N = current_N - reference_N
    penalty_N = (-difference_N).exp() + difference_N - 1
    loss_N = surrogate_N * weights_N + BETA * penalty_N - BONUS * batch.entropy_N.double()
    return loss_N, slope_N * weights_N + BETA * (1 - (-difference_N).exp())


def check(got: Outcome, loss_N: Tensor, slope_N: Tensor, bonus: float, keep_N: Tensor | None = None) -> None:
    """Compares the loss and its gradients by log-probs and entropies with those of the mean over kept tokens."""
    keep_N = torch.ones_like(loss_N, dtype=torch.bool) if keep_N is None else keep_N
    assert got.loss == pytest.approx(float((loss_N * keep_N).sum()) / got.num_tokens, rel=1e-5)
    assert got.num_tokens == int(keep_N.sum())
    torch.testing.assert_close(got.by_logprobs_N, slope_N * keep_N / got.num_tokens, rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(got.by_entropy_N, -bonus * keep_N.double() / got.num_tokens, rtol=1e-5, atol=0.0)


def clipped(current_N: Tensor, proximal_N: Tensor, advantages_N: Tensor) -> tuple[Tensor, Tensor]:
    """−min(ρA, clip(ρ)A) and its derivative by log π_current."""
    ratio_N = (current_N - proximal_N).exp()
    held_N = ((advantages_N > 0) & (ratio_N > 1.28)) | ((advantages_N < 0) & (ratio_N < 0.8))
    bounded_N = torch.where(advantages_N > 0, 1.28, 0.8).double()
    assert 0 < int(held_N.sum()) < len(held_N)
    return -advantages_N * torch.where(held_N, bounded_N, ratio_N), -advantages_N * ratio_N * ~held_N


@pytest.mark.parametrize("correction", ["token_clip", "token_tis"])
def test_surrogate_kl_and_entropy_add_up(batch: MadeUpBatch, correction: str) -> None:
    got = batch.outcome(AlgorithmConfig(loss=PLAIN_CLIP, correction=correction, **KL_AND_BONUS))
    current_N, proximal_N, behavior_N, _, advantages_N = doubles(batch)
    ratio_N = (proximal_N - behavior_N).exp()
    weights_N = ratio_N.clamp(max=2.0)
    if correction == "token_clip":
        stopped_N = ((advantages_N > 0) & (ratio_N > 2.0)) | ((advantages_N < 0) & (ratio_N < 0.8))
        assert 0 < int(stopped_N.sum()) < len(stopped_N)
        weights_N = weights_N * ~stopped_N
    terms = loss_with_kl_and_entropy(batch, *clipped(current_N, proximal_N, advantages_N), weights_N)
    check(got, *terms, BONUS)


def test_rejected_rows_are_left_out_of_every_part_of_the_loss(batch: MadeUpBatch) -> None:
    high = 0.08
    rejection = {"level": "geometric", "measure": "k3", "high": high}
    correction = {"preset": "k3_rs_token_tis", "rejections": [rejection]}
    got = batch.outcome(AlgorithmConfig(loss=PLAIN_CLIP, correction=correction, **KL_AND_BONUS))
    current_N, proximal_N, behavior_N, _, advantages_N = doubles(batch)
    log_ratio_N = proximal_N - behavior_N
    rows = (log_ratio_N.exp() - 1 - log_ratio_N).split(batch.layout.lengths_S.tolist())
    keep_N = torch.cat([torch.full((len(row),), float(row.mean()) <= high) for row in rows])
    assert 0 < int(keep_N.sum()) < len(keep_N)
    weights_N = log_ratio_N.exp().clamp(max=2.0)
    terms = loss_with_kl_and_entropy(batch, *clipped(current_N, proximal_N, advantages_N), weights_N)
    check(got, *terms, BONUS, keep_N)


def test_bypassed_weights_and_an_unbiased_kl_apply_the_ratio_once(batch: MadeUpBatch) -> None:
    kl = {"loss": {"coefficient": BETA, "unbiased": True}}
    got = batch.outcome(AlgorithmConfig(loss="reinforce", correction="bypass_icepop", kl=kl))
    current_N, _, behavior_N, reference_N, advantages_N = doubles(batch)
    ratio_N = (current_N - behavior_N).exp()
    weights_N = ratio_N * ((ratio_N >= 0.5) & (ratio_N <= 5.0))
    assert bool((weights_N == 0).any())
    difference_N = current_N - reference_N
    penalty_N = (-difference_N).exp() + difference_N - 1
    loss_N = -weights_N * advantages_N * current_N + BETA * ratio_N * penalty_N
    slope_N = -weights_N * advantages_N + BETA * ratio_N * (penalty_N + 1 - (-difference_N).exp())
    check(got, loss_N, slope_N, 0.0)


def test_the_critic_s_loss(batch: MadeUpBatch) -> None:
    objective = batch.objective(AlgorithmConfig(advantage="gae", critic={"value_clip": 0.2}))
    place = batch.layout.place_of(0, 0)
    values_M = (0.5 * torch.randn(len(place), generator=torch.Generator().manual_seed(1))).requires_grad_()
    loss = objective.value_loss(objective.begin_step(0, None), 0, values_M)
    (gradient_M,) = torch.autograd.grad(loss, values_M)
    assert batch.targets.returns_N is not None and batch.start.values_N is not None
    returns_M, before_M = batch.targets.returns_N[place], batch.start.values_N[place].double()
    errors_M = values_M.detach().double() - returns_M
    held_M = values_M.detach().double().clamp(before_M - 0.2, before_M + 0.2) - returns_M
    is_held_M = held_M.abs() > errors_M.abs()
    assert 0 < int(is_held_M.sum()) < len(place)
    want = float(torch.maximum(errors_M.square(), held_M.square()).mean()) / 2
    assert float(loss.detach()) == pytest.approx(want, rel=1e-5)
    expected_M = torch.where(is_held_M, 0.0, errors_M) / len(place)
    torch.testing.assert_close(gradient_M.double(), expected_M, rtol=1e-4, atol=1e-7)


# ---- non-finite numbers ----


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3", "k1+", "abs+", "k3+"])
def test_a_reference_that_is_not_finite_leaves_no_finite_gradient(
    batch: MadeUpBatch, estimator: str, value: float
) -> None:
    assert batch.start.reference_N is not None
    batch.start.reference_N[4] = value
    got = batch.outcome(AlgorithmConfig(kl={"loss": {"estimator": estimator}}))
    assert not math.isfinite(got.loss) and not bool(got.by_logprobs_N.isfinite().any())


def test_a_nan_among_old_values_leaves_no_finite_gradient_of_the_critic(batch: MadeUpBatch) -> None:
    assert batch.start.values_N is not None
    batch.start.values_N[2] = math.nan
    objective = batch.objective(AlgorithmConfig(advantage="gae"))
    values_M = torch.zeros(batch.layout.num_tokens, requires_grad=True)
    loss = objective.value_loss(objective.begin_step(0, None), 0, values_M)
    assert not bool(torch.autograd.grad(loss, values_M)[0].isfinite().any())


def test_the_guard_does_not_change_the_gradient_of_a_finite_loss(
    batch: MadeUpBatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = batch.outcome(AlgorithmConfig(**KL_AND_BONUS))
    monkeypatch.setattr(objective_module, "_break_gradient", lambda loss, outputs_M: None)
    plain = batch.outcome(AlgorithmConfig(**KL_AND_BONUS))
    assert torch.equal(guarded.by_logprobs_N, plain.by_logprobs_N)


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_a_nan_reference_log_prob_skips_the_step(
    make_learner: Callable[..., Learner], monkeypatch: pytest.MonkeyPatch, estimator: str, stage: int
) -> None:
    look = learner_module.compute_columns

    def look_badly(*arguments: Any, **options: Any) -> BatchColumns:
        start = look(*arguments, **options)
        assert start.reference_N is not None
        start.reference_N[3] = math.nan
        return start

    learner = make_learner(learning_rate=1e-2, zero_stage=stage, kl={"loss": {"estimator": estimator}})
    before = all_weights(learner)
    batch, by_id = make_batch([make_group(0), make_group(1)])
    with monkeypatch.context() as patch:
        patch.setattr(learner_module, "compute_columns", look_badly)
        result = learner.train(learner.prepare(batch, by_id))
    assert result.metrics["skipped_steps"] == 1 and not result.changed
    after = all_weights(learner)
    assert all(torch.equal(after[name], before[name]) for name in before)
    batch, by_id = make_batch([make_group(0), make_group(1)], policy_version=2)
    assert learner.train(learner.prepare(batch, by_id)).changed, "the next batch is trained"


# ---- operations over the whole batch ----


def test_a_selection_uses_the_proximal_policy_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_made_up(num_steps=2)
    batch = replace(batch, start=replace(batch.start, proximal_N=None))
    seen: list[LossTokens] = []

    def select(tokens: LossTokens, options: Any, *, seed: int) -> Tensor:
        seen.append(tokens)
        return select_clip_cov(tokens, options, seed=seed)

    monkeypatch.setattr(objective_module, "find_loss", lambda name: PolicyLoss(clip_cov, select))
    config = AlgorithmConfig(loss="clip_cov", correction="areal_loglinear")
    batch.objective(config).begin_step(1, batch.current_N)
    place, _ = batch.layout.tokens_of(1)
    assert batch.start.behavior_N is not None and batch.start.versions_N is not None
    columns = batch.current_N[place], batch.start.behavior_N[place], batch.start.versions_N[place]
    between_N = loglinear_proximal(*columns, batch_version=3, progress=0.5)
    assert not torch.equal(between_N, batch.current_N[place])
    assert torch.equal(seen[0].proximal_logprobs_N, between_N)


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_normalised_weights_average_1_over_trained_tokens(batch: MadeUpBatch, level: str) -> None:
    counts_R = torch.tensor([0.0, 1.0, 2.0, 1.0, 0.5, 0.0], dtype=torch.float64)
    config = AlgorithmConfig(correction={"weights": {"level": level, "normalize": True}})
    plan = batch.with_columns(counts_R=counts_R).objective(config).begin_step(0, None)
    assert plan.weights_N is not None
    lengths_R = batch.layout.lengths_R
    if level == "token":
        values, counts = plan.weights_N, counts_R.repeat_interleave(lengths_R)
    else:
        values, counts = plan.weights_N[lengths_R.cumsum(0) - lengths_R], counts_R
    assert float(values.double() @ counts) == pytest.approx(float(counts.sum()), rel=1e-6)
    assert torch.equal(plan.keep_N, counts_R.repeat_interleave(lengths_R) > 0)


# ---- the critic's loss ----


@pytest.mark.parametrize("case", golden_cases("value_loss/"), ids=lambda case: case.name)
def test_golden_value_loss(case: GoldenCase) -> None:
    mask_BT = case.inputs["response_mask"]
    values_N, lengths_B = flatten(case.inputs["vpreds"], mask_BT)
    values_N = values_N.clone().requires_grad_()
    returns_N, _ = flatten(case.inputs["returns"], mask_BT)
    start_N, _ = flatten(case.inputs["values"], mask_BT)
    terms = clipped_value_loss(values_N, returns_N, start_N, clip=case.hyper["cliprange_value"])
    shares_N = golden_shares(lengths_B, case.hyper["loss_agg_mode"], case.hyper["global"] or {}, mask_BT.shape[1])
    loss = torch.dot(terms.losses_N, shares_N)
    loss.backward()
    assert values_N.grad is not None
    case.check("loss", loss)
    case.check("grad_vpreds", unflatten(values_N.grad, mask_BT))
    case.check_metric("vf_clipfrac", float(terms.marks["clipped"].double().mean()))


def test_the_unclipped_loss_is_half_the_squared_error() -> None:
    terms = clipped_value_loss(torch.tensor([3.0]), torch.tensor([1.0]), torch.tensor([0.0]), clip=math.inf)
    assert terms.losses_N.tolist() == [2.0]
    assert terms.marks["clipped"].tolist() == [False]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", range(3))
def test_a_bad_value_makes_its_loss_non_finite(bad: float, place: int) -> None:
    arguments = [torch.ones(2) for _ in range(3)]
    arguments[place][1] = bad
    losses_N = clipped_value_loss(*arguments, clip=0.5).losses_N
    assert losses_N.isfinite().tolist() == [True, False] or (place == 2 and bad == math.inf)
