"""Behavior weights: the ratio π_proximal/π_behavior of a token, a row, or a row's geometric mean, bounded and detached.

Decoupled PPO (arXiv:2110.00641, for language models AReaL arXiv:2505.24298) splits the importance ratio in two:
π_current/π_behavior = π_current/π_proximal · π_proximal/π_behavior. The loss clips the first factor; the second is the
behavior weight, a constant of the optimisation. With z the log-ratio of a token:

    token      u = e^z                     low variance, biased: ignores the other tokens of the row
    sequence   u = e^(Σ_row z)             unbiased, variance grows exponentially with the row's length
    geometric  u = e^(mean_row z)          the row's ratio, normalised by its length

    truncated  w = min(max(u, low), high)  TIS: IMPALA arXiv:1802.01561, "Your Efficient RL Framework Secretly Brings
                                           You Off-Policy RL Training" (Yao et al. 2025)
    zeroed     w = u·[low ≤ u ≤ high]      IcePop arXiv:2510.18855 (tokens); masked importance sampling (rows; Liu, Li
                                           et al. 2025, "When Speed Kills Stability")
    stopped    w = min(u, high), but 0     PPO's clip (arXiv:1707.06347), applied around the sampler's policy as well.
               where A > 0 and u > high,   Consecutive batches sampled from one version push the same tokens, and PPO's
               or A < 0 and u < low        own clip moves along with the policy, so it does not limit their sum.

N loss tokens, flat, of B rows (see trainer/batch/ragged.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.trainer.batch.ragged import row_maxima, row_means, row_sums, spread
from tandem.trainer.off_policy.options import WeightOptions
from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO


def ratios(log_ratio_N: Tensor, lengths_B: Tensor, level: str) -> Tensor:
    """u of every token, (N,), its logarithm clamped to ±20; level `none` gives 1. Rows are summed in float64."""
    if level == "none":
        return torch.ones_like(log_ratio_N)
    if level == "token":
        return log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
    reduced = row_sums if level == "sequence" else row_means
    log_ratio_B = reduced(log_ratio_N.double(), lengths_B).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return spread(log_ratio_B.exp().to(log_ratio_N.dtype), lengths_B)


def bounded(ratio_N: Tensor, options: WeightOptions, advantages_N: Tensor | None) -> Tensor:
    """w of every token, (N,), as a new tensor. Only `stop` needs advantages."""
    if options.level == "none":
        return ratio_N.clone()
    if options.outside == "stop":
        assert advantages_N is not None, "weights that stop need advantages"
        pushed_out_N = ((advantages_N > 0) & (ratio_N > options.high)) | ((advantages_N < 0) & (ratio_N < options.low))
        return ratio_N.clamp(max=options.high).masked_fill_(pushed_out_N, 0.0)
    if options.outside == "clamp":
        return ratio_N.clamp(options.low, options.high)
    return torch.where((ratio_N >= options.low) & (ratio_N <= options.high), ratio_N, 0.0)


def mean_weight(
    weights_N: Tensor, keep_N: Tensor, lengths_B: Tensor, level: str, counts_N: Tensor | None = None
) -> Tensor:
    """The float64 mean over kept tokens, or over rows with a kept token for a row-level weight; 0 if nothing is kept.

    `counts_N` is how often each token counts, equal over a row; 0 leaves the row out.
    """
    kept, weights = keep_N.double(), weights_N.double()
    if counts_N is not None:
        kept = kept * counts_N
    if level in ("sequence", "geometric"):
        # All tokens of a row have the same weight and count, so a maximum selects them. An empty row's maximum is −inf.
        kept = row_maxima(kept, lengths_B).clamp(min=0.0)
        weights = torch.where(kept > 0, row_maxima(weights, lengths_B), 0.0)
    return torch.dot(weights, kept) / kept.sum().clamp(min=1)
