"""CISPO: the importance ratio is clipped as a weight, so no token loses its gradient (MiniMax-M1, arXiv:2506.13585).

With ρ = π_current/π_proximal, behavior weight w and sg the stop-gradient, a token's loss is

    L = −w · sg(clamp(ρ, 1 − low, 1 + high)) · A · log π_current.
"""

from __future__ import annotations

import torch

from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import CispoOptions


def cispo(tokens: LossTokens, options: CispoOptions) -> LossTerms:
    """Mark `clipped`: tokens whose ratio was clipped."""
    with torch.no_grad():
        ratio_N = tokens.importance_ratio_N
    clipped_N = ratio_N.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    factor_N = clipped_N * tokens.advantages_N * tokens.behavior_weights_N
    return LossTerms(-factor_N * tokens.current_logprobs_N, {"clipped": clipped_N != ratio_N})
