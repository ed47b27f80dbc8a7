"""Losses that bound a token's importance ratio: PPO's clipped surrogate, CISPO and SAPO.

ρ = π_current/π_proximal, clip(ρ) = clamp(ρ, 1 − low, 1 + high), w the behavior weight, sg(·) stops the gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import CispoOptions, ClippedSurrogateOptions, SapoOptions


def clipped_surrogate(tokens: LossTokens, options: ClippedSurrogateOptions) -> LossTerms:
    """w · max(−ρA, −clip(ρ)A), but at most w · c|A|, a bound ("dual clip") that is reached only where A < 0.

    PPO (arXiv:1707.06347), dual clip (arXiv:1912.09729), DAPO's clip-higher (arXiv:2503.14476). Marks: `clipped`,
    tokens bounded by the clip; `clipped_lower`, tokens bounded by the dual clip.
    """
    losses_N, clipped_N = clipped_losses(
        tokens.importance_ratio_N, tokens.advantages_N, options.clip_low, options.clip_high
    )
    marks = {"clipped": clipped_N}
    if options.dual_clip:
        bound_N = tokens.advantages_N.abs() * options.dual_clip
        marks["clipped_lower"] = losses_N.detach() > bound_N
        losses_N = torch.minimum(losses_N, bound_N)
    return LossTerms(losses_N * tokens.behavior_weights_N, marks)


def clipped_losses(ratio_N: Tensor, advantages_N: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """(max(−ρA, −clip(ρ)A), whether the clip removes the gradient), each (N,)."""
    unclipped_N = -advantages_N * ratio_N
    bounded_N = -advantages_N * ratio_N.clamp(1.0 - low, 1.0 + high)
    return torch.maximum(unclipped_N, bounded_N), bounded_N.detach() > unclipped_N.detach()


def cispo(tokens: LossTokens, options: CispoOptions) -> LossTerms:
    """−w · sg(clip(ρ)) · A · log π_current: no token loses its gradient (MiniMax-M1, arXiv:2506.13585).

    Mark `clipped`: tokens whose ratio was clipped.
    """
    with torch.no_grad():
        ratio_N = tokens.importance_ratio_N
    clipped_N = ratio_N.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    factor_N = clipped_N * tokens.advantages_N * tokens.behavior_weights_N
    return LossTerms(-factor_N * tokens.current_logprobs_N, {"clipped": clipped_N != ratio_N})


def sapo(tokens: LossTokens, options: SapoOptions) -> LossTerms:
    """−w · A · (4/τ) · σ(τ(ρ − 1)), σ the logistic function, τ chosen by the sign of A (arXiv:2511.20347).

    At ρ = 1 the gradient is REINFORCE's; it fades with the distance from 1. Has no marks: nothing is clipped.
    """
    positive_N = tokens.advantages_N > 0
    temperature_N = torch.where(positive_N, options.temperature_positive, options.temperature_negative)
    temperature_N = temperature_N.to(tokens.advantages_N.dtype)
    gate_N = torch.sigmoid(temperature_N * (tokens.importance_ratio_N - 1.0))
    return LossTerms(-4.0 * tokens.behavior_weights_N * tokens.advantages_N / temperature_N * gate_N)
