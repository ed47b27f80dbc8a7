"""Second-moment trust policy optimisation, M2PO (arXiv:2510.01161).

On stale data, PPO's clip removes rare, informative tokens. M2PO acts on the batch instead: while the mean of (log
π_current/π_behavior)² is above a threshold, it removes the gradient of the token with the largest value. R² times that
mean bounds the χ² divergence from the sampler, for ratios between 1/R and R.

It only considers tokens that PPO's min could clip: A > 0 and ratio > 1, or A < 0 and ratio < 1. Other tokens are
neither averaged nor masked. Masked tokens stay in the denominators of the loss.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO, LossTerms, LossTokens
from tandem.trainer.policy_losses.options import M2poOptions


def select_m2po(tokens: LossTokens, options: M2poOptions, *, seed: int) -> Tensor:
    """Tokens of the batch that lose their gradient, bool (N,): the fewest whose removal brings the mean square of the
    rest to the threshold or below.

    Tokens of equal log-ratio are treated alike, so the order of rows does not matter, and `seed` is unused. An infinite
    log-ratio counts as the largest; a NaN is not considered, and its loss is NaN.
    """
    log_ratio_N = tokens.behavior_log_ratio_N.detach().double()
    region_N = ((tokens.advantages_N > 0) & (log_ratio_N > 0)) | ((tokens.advantages_N < 0) & (log_ratio_N < 0))
    squares_N = log_ratio_N.square()
    # Squares up to the threshold never raise a mean above it, so only the larger ones are sorted.
    small_K = squares_N[region_N & (squares_N <= options.threshold)]
    ascending_K = squares_N[region_N & (squares_N > options.threshold)].sort().values
    counts_K = torch.arange(1, len(ascending_K) + 1, device=ascending_K.device) + len(small_K)
    over_K = ascending_K[(small_K.sum() + ascending_K.cumsum(0)) / counts_K > options.threshold]
    return region_N & (squares_N >= over_K[0]) if len(over_K) else torch.zeros_like(region_N)


def m2po(tokens: LossTokens, options: M2poOptions) -> LossTerms:
    """0 on the chosen tokens, −π_current/π_behavior·A elsewhere. The ratio replaces the behavior weights.

    Mark `clipped`: the chosen tokens. A NaN log-prob makes its token's loss NaN.
    """
    assert tokens.chosen_N is not None, "m2po needs select_m2po"
    ratio_N = tokens.behavior_log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses_N = -(ratio_N * ~tokens.chosen_N) * tokens.advantages_N
    return LossTerms(losses_N, {"clipped": tokens.chosen_N})
