"""The clipped surrogate: PPO (arXiv:1707.06347), dual clip (arXiv:1912.09729), DAPO's clip-higher (arXiv:2503.14476).

With ρ = π_current/π_proximal, clip(ρ) = clamp(ρ, 1 − low, 1 + high) and behavior weight w, a token's loss is

    L = w · max(−ρA, −clip(ρ)A), but at most w · c|A|.

The bound c ("dual clip") is reached only where A < 0. Plain PPO is low = high without the bound.
"""

from __future__ import annotations

import torch

from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import ClippedSurrogateOptions


def clipped_surrogate(tokens: LossTokens, options: ClippedSurrogateOptions) -> LossTerms:
    """Marks: `clipped`, tokens bounded by the clip; `clipped_lower`, tokens bounded by the dual clip."""
    ratio_N = tokens.importance_ratio_N
    unclipped_N = -tokens.advantages_N * ratio_N
    clipped_N = -tokens.advantages_N * ratio_N.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    losses_N = torch.maximum(unclipped_N, clipped_N)
    marks = {"clipped": clipped_N.detach() > unclipped_N.detach()}
    if options.dual_clip:
        bound_N = tokens.advantages_N.abs() * options.dual_clip
        marks["clipped_lower"] = losses_N.detach() > bound_N
        losses_N = torch.minimum(losses_N, bound_N)
    return LossTerms(losses_N * tokens.behavior_weights_N, marks)
