"""Second-moment trust policy optimisation, M2PO (arXiv:2510.01161).

The clip of PPO judges every token by itself, and on stale data it silences the rare, telling ones. M2PO judges the
batch: a token loses its gradient only while the mean of (log π_current/π_behavior)² is above a threshold, the largest
first. R²·that mean bounds the χ² divergence from the sampler, for ratios between 1/R and R.

Only the tokens of the trust region count: A > 0 and ratio > 1, or A < 0 and ratio < 1, the ones PPO's min would clip;
the others are neither averaged nor masked. The denominators of the loss keep the masked tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO, LossTerms, LossTokens
from tandem.trainer.policy_losses.options import M2poOptions


def select_m2po(tokens: LossTokens, options: M2poOptions, *, seed: int) -> Tensor:
    """The tokens of the batch that lose their gradient, bool (N,): as few as bring the mean square of the rest to the
    threshold or below.

    Tokens of equal log-ratio share their fate, so no order of rows changes it. Nothing is drawn, `seed` is unused.
    Without tokens in the trust region nothing is chosen. An infinite log-ratio is the largest; a NaN is outside the
    region, and its loss is NaN.
    """
    log_ratio_N = _log_ratios(tokens).detach().double()
    region_N = ((tokens.advantages_N > 0) & (log_ratio_N > 0)) | ((tokens.advantages_N < 0) & (log_ratio_N < 0))
    squares_N = log_ratio_N.square()
    # Squares up to the threshold never bring a mean above it: only the others need an order.
    small_K = squares_N[region_N & (squares_N <= options.threshold)]
    ascending_K = squares_N[region_N & (squares_N > options.threshold)].sort().values
    counts_K = torch.arange(1, len(ascending_K) + 1, device=ascending_K.device) + len(small_K)
    over_K = ascending_K[(small_K.sum() + ascending_K.cumsum(0)) / counts_K > options.threshold]
    if len(over_K) == 0:
        return torch.zeros_like(region_N)
    return region_N & (squares_N >= over_K[0])


def m2po(tokens: LossTokens, options: M2poOptions) -> LossTerms:
    """0 on the chosen tokens, −π_current/π_behavior·A elsewhere. M2PO (arXiv:2510.01161).

    The ratio goes to the sampler itself and replaces the behavior weights, which are not applied. Marks: `clipped`, the
    chosen tokens. A log-prob that is NaN makes its token's loss so.
    """
    assert tokens.chosen_N is not None, "m2po needs select_m2po"
    ratio_N = _log_ratios(tokens).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses_N = -(ratio_N * ~tokens.chosen_N) * tokens.advantages_N
    return LossTerms(losses_N, {"clipped": tokens.chosen_N})


def _log_ratios(tokens: LossTokens) -> Tensor:
    return tokens.current_logprobs_N - tokens.behavior_logprobs_N
