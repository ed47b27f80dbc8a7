"""Clip-Cov and KL-Cov: preserve entropy by restraining the few tokens that reduce it most (arXiv:2505.22617).

To first order, a policy-gradient step lowers the policy's entropy by the covariance of log-probability and advantage.
The covariance of one token is C = (A − ⟨A⟩)(ℓ − ⟨ℓ⟩), with ℓ = log π_current and ⟨·⟩ the mean over all loss tokens of
the batch; a few tokens account for most of the sum. Clip-Cov removes the gradient of some of them; KL-Cov adds a
penalty that keeps them near the proximal policy.

A token whose log-prob or advantage is not finite is in neither mean and is never chosen: its own loss is not finite, so
the step is skipped. ρ = π_current/π_proximal, w the behavior weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.trainer.policy_losses.clipped_surrogate import clipped_losses
from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import ClipCovOptions, KlCovOptions

LARGEST_LOG_RATIO = 64.0
"""Clamp of the log-ratio. The paper has none, but beyond it float32 would give inf, and NaN in the gradient."""


def select_clip_cov(tokens: LossTokens, options: ClipCovOptions, *, seed: int) -> Tensor:
    """Tokens of the batch that lose their gradient, bool (N,): max(1, ⌊fraction·N⌋) candidates drawn without
    replacement, or all of them if there are fewer.

    Candidates are tokens that PPO's clip does not bound and whose C is strictly between `covariance_low` and
    `covariance_high`. The same seed draws the same tokens on every device.
    """
    covariance_N, _ = _covariances(tokens)
    with torch.no_grad():
        _, clipped_N = _surrogate(tokens, options)
    candidates_N = ~clipped_N & (covariance_N > options.covariance_low) & (covariance_N < options.covariance_high)
    places_K = torch.nonzero(candidates_N)[:, 0]
    generator = torch.Generator().manual_seed(seed)
    drawn_K = torch.randperm(len(places_K), generator=generator)[: _quota(options.fraction, len(covariance_N))]
    chosen_N = torch.zeros_like(candidates_N)
    chosen_N[places_K[drawn_K.to(places_K.device)]] = True
    return chosen_N


def clip_cov(tokens: LossTokens, options: ClipCovOptions) -> LossTerms:
    """0 on the chosen tokens, −min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high)A)·w elsewhere: Clip-Cov.

    Marks: `clipped`, tokens without gradient (by PPO's clip or chosen); `chosen`.
    """
    assert tokens.chosen_N is not None, "clip_cov needs select_clip_cov"
    losses_N, clipped_N = _surrogate(tokens, options)
    # Multiplying instead of masking keeps a NaN even where the token was chosen.
    losses_N = losses_N * tokens.behavior_weights_N * ~tokens.chosen_N
    return LossTerms(losses_N, {"clipped": clipped_N | tokens.chosen_N, "chosen": tokens.chosen_N})


def select_kl_cov(tokens: LossTokens, options: KlCovOptions, *, seed: int) -> Tensor:
    """Tokens of the batch that carry the penalty, bool (N,): the max(1, ⌊fraction·N⌋) with the largest C; the first
    ones win ties, so `seed` is unused. Without a finite token nothing is chosen.
    """
    covariance_N, num_finite = _covariances(tokens)
    quota = min(_quota(options.fraction, len(covariance_N)), num_finite)
    if quota == 0:
        return torch.zeros_like(covariance_N, dtype=torch.bool)
    least = covariance_N.topk(quota, sorted=False).values.min()
    chosen_N = covariance_N >= least
    surplus = int(chosen_N.sum()) - quota
    if surplus:
        equal_K = torch.nonzero(covariance_N == least)[:, 0]
        chosen_N[equal_K[-surplus:]] = False
    return chosen_N


def kl_cov(tokens: LossTokens, options: KlCovOptions) -> LossTerms:
    """(−ρA + [chosen]·kl_coefficient·|log ρ|)·w: KL-Cov. No clipping; where ρ = 1 the penalty has no gradient.

    Marks: `chosen`; `abs_log_ratio`, |log ρ|.
    """
    assert tokens.chosen_N is not None, "kl_cov needs select_kl_cov"
    log_ratio_N = tokens.log_ratio_N
    distance_N = log_ratio_N.abs()
    penalty_N = torch.where(tokens.chosen_N, options.kl_coefficient * distance_N, 0.0)
    losses_N = (penalty_N - tokens.advantages_N * _ratios(log_ratio_N)) * tokens.behavior_weights_N
    return LossTerms(losses_N, {"chosen": tokens.chosen_N, "abs_log_ratio": distance_N.detach()})


def _ratios(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _surrogate(tokens: LossTokens, options: ClipCovOptions) -> tuple[Tensor, Tensor]:
    return clipped_losses(_ratios(tokens.log_ratio_N), tokens.advantages_N, options.clip_low, options.clip_high)


def _covariances(tokens: LossTokens) -> tuple[Tensor, int]:
    """(C of every token, −inf if its log-prob or advantage is not finite; number of finite ones). Means are float64."""
    logprobs_N, advantages_N = tokens.current_logprobs_N.detach(), tokens.advantages_N
    means = [values_N.mean(dtype=torch.float64) for values_N in (logprobs_N, advantages_N)]
    finite_N = None
    if not all(mean.isfinite() for mean in means):
        finite_N = (logprobs_N + advantages_N).isfinite()
        means = [values_N[finite_N].mean(dtype=torch.float64) for values_N in (logprobs_N, advantages_N)]
    covariance_N = (logprobs_N - means[0].to(logprobs_N.dtype)) * (advantages_N - means[1].to(advantages_N.dtype))
    if finite_N is None:
        return covariance_N, len(covariance_N)
    return covariance_N.masked_fill(~finite_N, -torch.inf), int(finite_N.sum())


def _quota(fraction: float, num_tokens: int) -> int:
    """At least one, as in the golden convention."""
    return max(1, int(fraction * num_tokens))
