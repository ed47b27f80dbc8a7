"""The KL penalty: golden values and gradients, unbiasedness by enumeration, coefficients, bad input."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from tandem.protos.errors import DataError
from tandem.trainer.algorithm import KlEstimator, KlOptions, KlPenalty, LossKl, RewardKl
from tandem.trainer.kl import (
    KlCoefficients,
    first_coefficients,
    kl_estimates,
    kl_in_reward,
    kl_loss,
    next_coefficient,
    next_coefficients,
)
from tests.support.golden_cases import GoldenCase, flatten, golden_cases, unflatten

NAMES = ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl")
ESTIMATORS = [case for name in NAMES for case in golden_cases(f"kl/{name}/") + golden_cases(f"kl/{name}+/")]


def test_every_golden_case_is_tested() -> None:
    covered = ESTIMATORS + golden_cases("kl/adaptive_controller/") + golden_cases("kl/kl_in_reward/")
    assert {case.name for case in covered} == {case.name for case in golden_cases("kl/")}


@pytest.mark.parametrize("case", ESTIMATORS, ids=lambda case: case.name)
def test_golden_estimates(case: GoldenCase) -> None:
    logprobs_BT = case.inputs["logprob"].clone().requires_grad_()
    estimator = case.name.split("/")[1]
    values_N = kl_estimates(logprobs_BT.flatten(), case.inputs["ref_logprob"].flatten(), estimator)
    case.check("value", values_N.view_as(logprobs_BT))
    (values_N * case.inputs["cotangent"].flatten()).sum().backward()
    assert logprobs_BT.grad is not None
    case.check("grad_logprob", logprobs_BT.grad)


@pytest.mark.parametrize("case", golden_cases("kl/adaptive_controller/"), ids=lambda case: case.name)
def test_golden_adaptive_coefficient(case: GoldenCase) -> None:
    penalty = KlPenalty(
        coefficient=case.hyper["init_kl_coef"], target=case.hyper["target_kl"], horizon=case.hyper["horizon"]
    )
    coefficients = [penalty.coefficient]
    for kl, number in zip(case.inputs["current_kl"].tolist(), case.inputs["n_steps"].tolist(), strict=True):
        coefficients.append(next_coefficient(coefficients[-1], penalty, kl, number))
    case.check("coef", torch.tensor(coefficients, dtype=torch.float64))


@pytest.mark.parametrize("case", golden_cases("kl/kl_in_reward/"), ids=lambda case: case.name)
def test_golden_kl_in_reward(case: GoldenCase) -> None:
    mask_BT = case.inputs["response_mask"]
    rewards_N, lengths_B = flatten(case.inputs["token_level_scores"], mask_BT)
    logprobs_N, _ = flatten(case.inputs["old_log_probs"], mask_BT)
    reference_N, _ = flatten(case.inputs["ref_log_prob"], mask_BT)
    penalty = RewardKl(
        estimator=case.hyper["kl"],
        coefficient=case.hyper["init_kl_coef"],
        target=case.hyper["target_kl"],
        horizon=case.hyper["horizon"],
    )
    got_N, kl = kl_in_reward(
        rewards_N, logprobs_N, reference_N, lengths_B, penalty, coefficient=case.metrics["coef_used"]
    )
    unmasked_BT = case.inputs["token_level_scores"] * (1 - mask_BT.double())
    case.check("token_level_rewards", unflatten(got_N, mask_BT) + unmasked_BT)
    case.check_metric("kl_mean", kl)
    case.check_metric("coef_after", next_coefficient(penalty.coefficient, penalty, kl, len(lengths_B)))


def kl_of(scores_V: Tensor, reference_V: Tensor) -> Tensor:
    logprobs_V = scores_V.log_softmax(0)
    return (logprobs_V.exp() * (logprobs_V - reference_V)).sum()


def expected_gradient(scores_V: Tensor, reference_V: Tensor, penalty: LossKl, behavior_V: Tensor) -> Tensor:
    """Expected gradient of the loss's KL term under the behavior policy, by enumerating all tokens."""
    scores_V = scores_V.clone().requires_grad_()
    logprobs_V = scores_V.log_softmax(0)
    ratio_V = (logprobs_V - behavior_V).exp()
    (behavior_V.exp() * kl_loss(logprobs_V, reference_V, penalty, ratio_N=ratio_V)).sum().backward()
    assert scores_V.grad is not None
    return scores_V.grad


Policies = tuple[Tensor, Tensor, Tensor]


@pytest.fixture
def policies() -> Policies:
    generator = torch.Generator().manual_seed(0)
    scores_V = torch.randn(7, generator=generator, dtype=torch.float64)
    reference_V = torch.randn(7, generator=generator, dtype=torch.float64).log_softmax(0)
    behavior_V = (scores_V + 0.5 * torch.randn(7, generator=generator, dtype=torch.float64)).log_softmax(0)
    return scores_V, reference_V, behavior_V


def true_gradient(scores_V: Tensor, reference_V: Tensor) -> Tensor:
    scores_V = scores_V.clone().requires_grad_()
    kl_of(scores_V, reference_V).backward()
    assert scores_V.grad is not None
    return scores_V.grad


@pytest.mark.parametrize(
    ("estimator", "unbiased"),
    [
        *((one, False) for one in ("k2", "k1+", "k3+", "abs+")),
        *((one, True) for one in ("k1", "k3", "kl", "low_var_kl")),
    ],
)
def test_the_gradient_is_that_of_the_kl(estimator: KlEstimator, unbiased: bool, policies: Policies) -> None:
    """That of k2 and of a straight-through estimator on-policy, that of an unbiased one off-policy."""
    scores_V, reference_V, behavior_V = policies
    sampled_V = behavior_V if unbiased else scores_V.log_softmax(0)
    got_V = expected_gradient(scores_V, reference_V, LossKl(estimator=estimator, unbiased=unbiased), sampled_V)
    torch.testing.assert_close(got_V, true_gradient(scores_V, reference_V))


def test_the_on_policy_gradient_is_zero_in_the_mean_for_k1_and_biased_for_k3(policies: Policies) -> None:
    scores_V, reference_V, _ = policies
    on_policy_V = scores_V.log_softmax(0)
    k1_V = expected_gradient(scores_V, reference_V, LossKl(estimator="k1"), on_policy_V)
    torch.testing.assert_close(k1_V, torch.zeros_like(k1_V))
    k3_V = expected_gradient(scores_V, reference_V, LossKl(estimator="k3"), on_policy_V)
    assert not torch.allclose(k3_V, true_gradient(scores_V, reference_V), rtol=0.05)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_mean_of_k1_and_k3_is_the_kl(estimator: KlEstimator, policies: Policies) -> None:
    scores_V, reference_V, _ = policies
    logprobs_V = scores_V.log_softmax(0)
    mean = (logprobs_V.exp() * kl_estimates(logprobs_V, reference_V, estimator)).sum()
    torch.testing.assert_close(mean, kl_of(scores_V, reference_V))


@pytest.mark.parametrize("estimator", [*NAMES, *(name + "+" for name in NAMES)])
def test_the_kl_to_the_same_policy_is_zero_and_that_of_a_nan_is_nan(estimator: KlEstimator) -> None:
    logprobs_N = torch.tensor([-0.1, -3.0, -20.0], requires_grad=True)
    values_N = kl_estimates(logprobs_N, logprobs_N.detach(), estimator)
    assert values_N.tolist() == [0.0, 0.0, 0.0]
    (gradient_N,) = torch.autograd.grad(values_N.sum(), logprobs_N)
    assert gradient_N.tolist() == ([1.0] * 3 if estimator in ("k1", "kl") else [0.0] * 3)
    broken_N = kl_estimates(torch.tensor([math.nan, -1.0]), torch.zeros(2), estimator)
    assert broken_N.isnan().tolist() == [True, False]


def test_bad_logprobs_are_refused_in_the_reward() -> None:
    rewards_N, lengths_R = torch.zeros(3, dtype=torch.float64), torch.tensor([2, 1])
    fine_N, bad_N = torch.zeros(3), torch.tensor([0.0, math.nan, -math.inf])
    with pytest.raises(DataError, match="2 of 3 log-probs of the reference policy's model"):
        kl_in_reward(rewards_N, fine_N, bad_N, lengths_R, RewardKl(), coefficient=0.1)
    with pytest.raises(DataError, match="2 of 3 log-probs of the policy's model"):
        kl_in_reward(rewards_N, bad_N, fine_N, lengths_R, RewardKl(), coefficient=0.1)
    with pytest.raises(AssertionError):
        kl_in_reward(rewards_N, fine_N[:2], fine_N, lengths_R, RewardKl(), coefficient=0.1)


def test_a_batch_without_tokens_has_no_kl() -> None:
    nothing_N = torch.zeros(0, dtype=torch.float64)
    for lengths_R in (torch.zeros(0, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)):
        rewards_N, kl = kl_in_reward(nothing_N, nothing_N, nothing_N, lengths_R, RewardKl(), coefficient=0.1)
        assert rewards_N.shape == (0,) and kl == 0.0
    assert kl_estimates(nothing_N, nothing_N, "k3+").shape == (0,)


def test_coefficients_adapt_to_their_targets_and_survive_json() -> None:
    options = KlOptions(reward=RewardKl(coefficient=0.1, target=1.0, horizon=100), loss=LossKl(coefficient=0.2))
    start = first_coefficients(options)
    assert start == KlCoefficients(0.1, 0.2)
    after = next_coefficients(start, options, reward_kl=9.0, loss_kl=9.0, num_trajectories=50)
    assert after == KlCoefficients(pytest.approx(0.1 * 1.1), 0.2)  # stays constant without a target
    assert KlCoefficients(**json.loads(json.dumps(asdict(after)))) == after
    none = first_coefficients(KlOptions())
    assert none == KlCoefficients(0.0, 0.0)
    assert next_coefficients(none, KlOptions(), reward_kl=9.0, loss_kl=9.0, num_trajectories=50) == none


def test_a_resumed_run_restores_only_coefficients_with_a_target() -> None:
    saved = asdict(KlCoefficients(reward=0.3, loss=0.4))
    options = KlOptions(reward=RewardKl(coefficient=0.1, target=1.0), loss=LossKl(coefficient=0.2))
    assert first_coefficients(options, saved) == KlCoefficients(0.3, 0.2)
    assert first_coefficients(options, {}) == KlCoefficients(0.1, 0.2), "a checkpoint that knows of none"
    assert first_coefficients(options, asdict(KlCoefficients(0.0, 0.0))) == KlCoefficients(0.1, 0.2), "there was none"
    assert first_coefficients(KlOptions(), saved) == KlCoefficients(0.0, 0.0)


def test_one_update_at_most_halves_the_coefficient_and_a_bad_kl_leaves_it() -> None:
    penalty = KlPenalty(target=1.0, horizon=10)
    assert next_coefficient(1.0, penalty, 0.0, 10_000) == 0.5
    assert next_coefficient(1.0, penalty, 9.0, 10_000) == 1.5
    assert next_coefficient(1.0, penalty, math.nan, 5) == 1.0
    assert next_coefficient(1.0, penalty, math.inf, 5) == 1.0


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        *(
            ({"estimator": one, "unbiased": True}, "unbiased needs the estimator k1 or k3")
            for one in ("k2", "abs", "k3+")
        ),
        ({"coefficient": -1.0}, "coefficient"),
        ({"coefficient": math.nan}, "coefficient"),
        ({"target": 0.0}, "target"),
        ({"horizon": 0}, "horizon"),
        ({"estimator": "k4"}, "estimator"),
        ({"beta": 1.0}, "beta"),
    ],
)
def test_bad_options_are_refused(bad: dict[str, object], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LossKl.model_validate(bad)
