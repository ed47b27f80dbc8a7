"""The KL penalty towards a frozen reference policy: token-level estimates, in the reward or in the loss, and its
coefficient.

With d = log π − log π_reference of a token sampled from π, KL(π ‖ π_reference) is estimated by (Schulman,
"Approximating KL divergence", 2020)

    k1 (kl)          d
    abs              |d|
    k2 (mse)         d²/2
    k3 (low_var_kl)  e^(−d) + d − 1, d clamped to ±20 and the result to at most 10

A trailing `+` keeps the value and uses the gradient of k2, d·∇log π, whose expectation under π is the gradient of the
KL.

N: loss tokens, flat, of R trajectories (trainer/batch/ragged.py). Non-finite log-probs in the reward raise an error; in
the loss they make the loss and its gradient non-finite (trainer/objective.py), so the optimizer step is skipped and
counted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from tandem.protos.errors import DataError
from tandem.trainer.algorithm import KlEstimator, KlOptions, KlPenalty, LossKl, RewardKl
from tandem.trainer.batch.ragged import row_means

MAX_LOG_RATIO = 20.0
MAX_K3 = 10.0
MAX_ERROR = 0.2
"""Largest relative error of the KL against its target that one update uses (arXiv:1909.08593, section 2.2)."""
MAX_HORIZONS = 2.5
"""Cap on batch size over horizon, so that one update at most halves the coefficient and never changes its sign."""


def kl_estimates(logprobs_N: Tensor, reference_logprobs_N: Tensor, estimator: KlEstimator) -> Tensor:
    """The estimate for every token; gradient flows through `logprobs_N` and is 0 where k3's clamps apply."""
    assert logprobs_N.ndim == 1, logprobs_N.shape
    assert logprobs_N.shape == reference_logprobs_N.shape, (logprobs_N.shape, reference_logprobs_N.shape)
    difference_N = logprobs_N - reference_logprobs_N.detach()
    values_N = _estimates(difference_N, estimator.removesuffix("+"))
    if not estimator.endswith("+"):
        return values_N
    gradient_N = difference_N.square() / 2
    return values_N.detach() + (gradient_N - gradient_N.detach())


def _estimates(difference_N: Tensor, name: str) -> Tensor:
    match name:
        case "k1" | "kl":
            return difference_N
        case "abs":
            return difference_N.abs()
        case "k2" | "mse":
            return difference_N.square() / 2
    clamped_N = difference_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    values_N = (torch.expm1(-clamped_N) + clamped_N).clamp(max=MAX_K3)
    return torch.where(difference_N.isfinite(), values_N, math.nan)  # the clamps would turn infinity into a number


def kl_loss(current_logprobs_N: Tensor, reference_logprobs_N: Tensor, penalty: LossKl, *, ratio_N: Tensor) -> Tensor:
    """The penalty of every token before the factor β.

    `ratio_N` is π_current/π_behavior with its gradient (importance ratio times behavior weight, unless the proximal
    policy is bypassed). Only `penalty.unbiased` uses it: E_behavior[∇(ratio·k)] = ∇KL for k1 and k3 (DeepSeek-V3.2,
    arXiv:2512.02556, eq. 7), for samples of any staleness.
    """
    assert ratio_N.shape == current_logprobs_N.shape, (ratio_N.shape, current_logprobs_N.shape)
    estimates_N = kl_estimates(current_logprobs_N, reference_logprobs_N, penalty.estimator)
    return ratio_N * estimates_N if penalty.unbiased else estimates_N


def kl_in_reward(
    rewards_N: Tensor,
    logprobs_N: Tensor,
    reference_logprobs_N: Tensor,
    lengths_R: Tensor,
    penalty: RewardKl,
    *,
    coefficient: float,
) -> tuple[Tensor, float]:
    """(r − β·k of every token, mean over trajectories of their mean k). No gradient.

    `logprobs_N` are the proximal ones. A trajectory without a loss token counts with mean 0; without trajectories the
    mean is 0. Raises DataError if a log-prob is NaN or infinite.
    """
    assert rewards_N.shape == logprobs_N.shape, (rewards_N.shape, logprobs_N.shape)
    for name, values_N in (("the policy's", logprobs_N), ("the reference policy's", reference_logprobs_N)):
        if num_bad := int((~torch.isfinite(values_N)).sum()):
            raise DataError(
                f"{num_bad} of {values_N.numel()} log-probs of {name} model are NaN or infinite: its weights are broken"
            )
    estimates_N = kl_estimates(logprobs_N.detach(), reference_logprobs_N, penalty.estimator).to(rewards_N.dtype)
    means_R = row_means(estimates_N, lengths_R)
    return rewards_N - coefficient * estimates_N, float(means_R.mean()) if len(means_R) else 0.0


@dataclass(frozen=True, slots=True)
class KlCoefficients:
    """β in the reward and in the loss; 0 without that penalty. Checkpoints hold `dataclasses.asdict` of it as JSON."""

    reward: float
    loss: float


def first_coefficients(options: KlOptions, saved: Mapping[str, float] = MappingProxyType({})) -> KlCoefficients:
    """The coefficients that the options set, or those of a checkpoint where a target adapts them."""

    def first(penalty: KlPenalty | None, name: str) -> float:
        if penalty is None:
            return 0.0
        return (saved.get(name) if penalty.target is not None else None) or penalty.coefficient

    return KlCoefficients(first(options.reward, "reward"), first(options.loss, "loss"))


def next_coefficients(
    coefficients: KlCoefficients, options: KlOptions, *, reward_kl: float, loss_kl: float, num_trajectories: int
) -> KlCoefficients:
    """The coefficients after a batch of `num_trajectories` with these measured KLs (unused without a penalty or
    target).
    """
    return KlCoefficients(
        reward=next_coefficient(coefficients.reward, options.reward, reward_kl, num_trajectories),
        loss=next_coefficient(coefficients.loss, options.loss, loss_kl, num_trajectories),
    )


def next_coefficient(coefficient: float, penalty: KlPenalty | None, kl: float, num_trajectories: int) -> float:
    """β·(1 + clamp(kl/target − 1, ±0.2)·n/horizon) (Ziegler et al., arXiv:1909.08593).

    β does not change without a target or if the KL is not finite.
    """
    if penalty is None or penalty.target is None or not math.isfinite(kl):
        return coefficient
    error = min(max(kl / penalty.target - 1.0, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1.0 + error * min(num_trajectories / penalty.horizon, MAX_HORIZONS))
