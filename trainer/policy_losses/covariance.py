"""Clip-Cov and KL-Cov: entropy is kept by restraining the few tokens that use it up (arXiv:2505.22617).

To first order a policy-gradient step lowers the entropy of the policy by the covariance of log-probability and
advantage. The covariance of one token is C = (A − ⟨A⟩)(ℓ − ⟨ℓ⟩), ℓ = log π_current and ⟨·⟩ the mean over all loss
tokens of the batch; few tokens make up most of it. Clip-Cov takes the gradient from some of them, KL-Cov holds them to
the proximal policy.

Which tokens, a `select_*` decides once for the whole batch; the losses read it from `chosen_N`, so no cut into
micro-batches changes it. A token whose log-prob or advantage is not finite enters neither mean and is never chosen: its
own loss is not finite, and the step is skipped for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import ClipCovOptions, KlCovOptions

LARGEST_LOG_RATIO = 64.0
"""The paper does not clamp the log-ratio; past ±64 it is clamped all the same, lest float32 give inf, and its gradient
NaN.
"""


def select_clip_cov(tokens: LossTokens, options: ClipCovOptions, *, seed: int) -> Tensor:
    """The tokens of the batch that lose their gradient, bool (N,): max(1, ⌊fraction·N⌋) candidates drawn without
    replacement.

    Candidates are those that PPO's clip leaves alone and whose C lies strictly between `covariance_low` and
    `covariance_high`. With too few of them all are taken; with none, or without tokens, nothing is chosen. The same
    seed draws the same tokens on every device.
    """
    covariance_N, _ = _covariances(tokens)
    with torch.no_grad():
        _, _, clipped_N = _surrogates(tokens, options)
    candidates_N = ~clipped_N & (covariance_N > options.covariance_low) & (covariance_N < options.covariance_high)
    places_K = torch.nonzero(candidates_N)[:, 0]
    generator = torch.Generator().manual_seed(seed)
    drawn_K = torch.randperm(len(places_K), generator=generator)[: _quota(options.fraction, len(covariance_N))]
    chosen_N = torch.zeros_like(candidates_N)
    chosen_N[places_K[drawn_K.to(places_K.device)]] = True
    return chosen_N


def clip_cov(tokens: LossTokens, options: ClipCovOptions) -> LossTerms:
    """0 on the chosen tokens, −min(ρA, clip(ρ, 1 − clip_low, 1 + clip_high)A)·w elsewhere: Clip-Cov (arXiv:2505.22617).

    ρ = π_current/π_proximal, w the behavior weight. Marks: `clipped`, the tokens without gradient, by PPO's clip or
    chosen; `chosen`.
    """
    assert tokens.chosen_N is not None, "clip_cov needs select_clip_cov"
    unclipped_N, bounded_N, clipped_N = _surrogates(tokens, options)
    # Multiplied, not masked: a NaN stays one even where it was chosen.
    losses_N = torch.maximum(unclipped_N, bounded_N) * tokens.behavior_weights_N * ~tokens.chosen_N
    return LossTerms(losses_N, {"clipped": clipped_N | tokens.chosen_N, "chosen": tokens.chosen_N})


def select_kl_cov(tokens: LossTokens, options: KlCovOptions, *, seed: int) -> Tensor:
    """The tokens of the batch that carry the penalty, bool (N,): the max(1, ⌊fraction·N⌋) of largest C, among equals
    the first ones.

    Nothing is drawn, `seed` is unused. Without a finite token nothing is chosen.
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
    """(−ρA + [chosen]·kl_coefficient·|log ρ|)·w: KL-Cov (arXiv:2505.22617). No clipping; on the policy itself the
    penalty has no gradient.

    ρ = π_current/π_proximal, w the behavior weight. Marks: `chosen`; `abs_log_ratio`, |log ρ|.
    """
    assert tokens.chosen_N is not None, "kl_cov needs select_kl_cov"
    log_ratio_N = tokens.log_ratio_N
    distance_N = log_ratio_N.abs()
    penalty_N = torch.where(tokens.chosen_N, options.kl_coefficient * distance_N, 0.0)
    losses_N = (penalty_N - tokens.advantages_N * _ratios(log_ratio_N)) * tokens.behavior_weights_N
    return LossTerms(losses_N, {"chosen": tokens.chosen_N, "abs_log_ratio": distance_N.detach()})


def _ratios(log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()


def _surrogates(tokens: LossTokens, options: ClipCovOptions) -> tuple[Tensor, Tensor, Tensor]:
    """(−ρA, −clip(ρ)A, whether PPO's clip takes the gradient), each (N,)."""
    ratio_N = _ratios(tokens.log_ratio_N)
    unclipped_N = -tokens.advantages_N * ratio_N
    bounded_N = -tokens.advantages_N * ratio_N.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    return unclipped_N, bounded_N, (bounded_N > unclipped_N).detach()


def _covariances(tokens: LossTokens) -> tuple[Tensor, int]:
    """(C of every token, −inf where log-prob or advantage is not finite; how many are). The means are taken in
    float64.
    """
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
    """At least one, as the golden convention has it."""
    return max(1, int(fraction * num_tokens))
