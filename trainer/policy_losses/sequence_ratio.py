"""Losses with one importance ratio per row: GSPO and GMPO. A row is a segment without its rejected tokens.

δ = log π_current − log π_proximal, ⟨·⟩ the mean over a row's loss tokens, w the behavior weight, sg(·) stops the
gradient.
"""

from __future__ import annotations

import torch

from tandem.trainer.batch.ragged import row_means, spread
from tandem.trainer.policy_losses.clipped_surrogate import clipped_losses
from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import GmpoOptions, GspoOptions

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Upper clamp of GSPO's mean log-ratio before the exponential."""

SMALLEST_WEIGHT = 1e-10
"""Added to a weight before its logarithm: one weight of 0 divides the loss of a row of n tokens by e^(23/n)."""

LARGEST_EXPONENT = 64.0
"""Clamp of a row's log-ratio, so that float32 does not give inf. GMPO's paper does not bound tokens that move against
their advantage.
"""


def gspo(tokens: LossTokens, options: GspoOptions) -> LossTerms:
    """w · max(−sA, −clamp(s, 1 − low, 1 + high)A), s = exp(sg⟨δ⟩ + log π_current − sg(log π_current)): the value of the
    sequence's ratio and the gradient of the token's log-prob ("GSPO-token", arXiv:2507.18071).

    If advantages and weights are constant over a row, its gradient equals that of the sequence form; otherwise only the
    token form is defined. Mark `clipped`: tokens of rows whose ratio the clip bounds.
    """
    mean_B = row_means(tokens.log_ratio_N.detach(), tokens.lengths_B)
    own_N = tokens.current_logprobs_N - tokens.current_logprobs_N.detach()
    ratio_N = (spread(mean_B, tokens.lengths_B) + own_N).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    losses_N, clipped_N = clipped_losses(ratio_N, tokens.advantages_N, options.clip_low, options.clip_high)
    return LossTerms(losses_N * tokens.behavior_weights_N, {"clipped": clipped_N})


def gmpo(tokens: LossTokens, options: GmpoOptions) -> LossTerms:
    """−⟨A⟩ · exp⟨x⟩ · exp⟨log w⟩ for every token of the row: the geometric mean of ratios and weights
    (arXiv:2507.20673).

    x = min(δ, high) if A > 0, max(δ, −low) if A < 0, 0 if A = 0. Marks: `clipped`, tokens clipped from above (A > 0);
    `clipped_lower`, from below (A < 0).
    """
    log_ratio_N, lengths_B = tokens.log_ratio_N, tokens.lengths_B
    sign_N = tokens.advantages_N.sign()
    # sign · min(sign·δ, limit) is the formula above, with limit `high` for sign 1 and `low` for sign −1.
    limit_N = (options.clip_high - options.clip_low) / 2 * sign_N + (options.clip_high + options.clip_low) / 2
    signed_N = sign_N * log_ratio_N
    clipped_log_ratio_N = sign_N * torch.minimum(signed_N, limit_N)
    log_weight_N = (tokens.behavior_weights_N + SMALLEST_WEIGHT).log()
    exponent_B = row_means(clipped_log_ratio_N + log_weight_N, lengths_B).clamp(max=LARGEST_EXPONENT)
    losses_B = -row_means(tokens.advantages_N, lengths_B) * exponent_B.exp()
    cut_N = signed_N.detach() > limit_N
    marks = {"clipped": cut_N & (sign_N > 0), "clipped_lower": cut_N & (sign_N < 0)}
    return LossTerms(spread(losses_B, lengths_B), marks)
