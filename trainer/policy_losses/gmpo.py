"""GMPO: the geometric instead of the arithmetic mean of the tokens' ratios (arXiv:2507.20673).

With δ = log π_current − log π_proximal, clipped per token on the side that its advantage pushes to,

    x = min(δ, high) if A > 0, max(δ, −low) if A < 0, 0 if A = 0,

and ⟨·⟩ the mean over a row's n loss tokens, every token of the row has the loss

    L = −⟨A⟩ · exp⟨x⟩ · exp⟨log w⟩.

Behavior weights w are averaged geometrically like the ratios that they correct. The paper aggregates with
`seq-mean-token-mean`.
"""

from __future__ import annotations

import torch

from tandem.trainer.batch.ragged import row_means, spread
from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import GmpoOptions

SMALLEST_WEIGHT = 1e-10
"""Added to a weight before its logarithm: one weight of 0 divides the loss of a row of n tokens by e^(23/n)."""

LARGEST_EXPONENT = 64.0
"""Clamp of a row's log-ratio, so that float32 does not give inf. The paper does not bound tokens that move against
their advantage.
"""


def gmpo(tokens: LossTokens, options: GmpoOptions) -> LossTerms:
    """Marks: `clipped`, tokens clipped from above (A > 0); `clipped_lower`, from below (A < 0). A row is a segment."""
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
