"""DPPO: a trust region in probability instead of in its ratio (arXiv:2602.04879, the binary divergences).

With π = π_current and π° = π_proximal of the sampled token, ρ = π/π°, behavior weight w and sg the stop-gradient, a
token's loss is

    L = −w · sg(v · min(ρ, cap)) · A · log π,

where v is 0 if the update has left the trust region in the direction that the advantage pushes, else 1. v is 1 if

    total variation:  A > 0: π − π° ≤ high;               else π − π° ≥ −low;
    KL:               A > 0: D ≤ high or π ≤ π°;          else D ≤ low or π ≥ π°,
                      D = π° log(π°/π) + (1 − π°) log((1 − π°)/(1 − π)).

The paper's π° is the sampler's policy; use `proximal = "bypassed"` (see trainer/off_policy) for that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import DppoKlOptions, DppoTvOptions

_EPSILON = 1e-8
"""Added to 1 − π, which is 0 for a token with probability 1."""


def dppo_tv(tokens: LossTokens, options: DppoTvOptions) -> LossTerms:
    """Marks: `clipped`, tokens outside the trust region; `clipped_lower`, tokens inside whose ratio was capped."""
    rise_N = tokens.current_logprobs_N.detach().exp() - tokens.proximal_logprobs_N.exp()
    positive_N = tokens.advantages_N > 0
    outside_N = (positive_N & (rise_N > options.threshold_high)) | (~positive_N & (rise_N < -options.threshold_low))
    return _loss(tokens, outside_N, options.ratio_cap)


def dppo_kl(tokens: LossTokens, options: DppoKlOptions) -> LossTerms:
    """Marks: `clipped`, tokens outside the trust region; `clipped_lower`, tokens inside whose ratio was capped."""
    current_N, proximal_N = tokens.current_logprobs_N.detach(), tokens.proximal_logprobs_N
    p_current_N, p_proximal_N = current_N.exp(), proximal_N.exp()
    other_current_N = (1.0 - p_current_N).clamp(min=0.0) + _EPSILON
    other_proximal_N = (1.0 - p_proximal_N).clamp(min=0.0) + _EPSILON
    divergence_N = p_proximal_N * (proximal_N - current_N)
    divergence_N = divergence_N + (1.0 - p_proximal_N) * (other_proximal_N / other_current_N).log()
    positive_N = tokens.advantages_N > 0
    outside_N = (positive_N & (divergence_N > options.threshold_high) & (p_current_N > p_proximal_N)) | (
        ~positive_N & (divergence_N > options.threshold_low) & (p_current_N < p_proximal_N)
    )
    return _loss(tokens, outside_N, options.ratio_cap)


def _loss(tokens: LossTokens, outside_N: Tensor, ratio_cap: float) -> LossTerms:
    with torch.no_grad():
        ratio_N = tokens.importance_ratio_N
    factor_N = ratio_N.clamp(max=ratio_cap) * tokens.advantages_N * tokens.behavior_weights_N
    # Multiplying instead of masking keeps a NaN even outside the trust region.
    losses_N = -(factor_N * ~outside_N) * tokens.current_logprobs_N
    return LossTerms(losses_N, {"clipped": outside_N, "clipped_lower": ~outside_N & (ratio_N > ratio_cap)})
