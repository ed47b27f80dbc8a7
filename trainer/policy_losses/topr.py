"""Tapered off-policy REINFORCE (arXiv:2503.14286)."""

from __future__ import annotations

import torch

from tandem.trainer.batch.ragged import row_sums, spread
from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import ToprOptions


def topr(tokens: LossTokens, options: ToprOptions) -> LossTerms:
    """−A·log π_current where A ≥ 0, −min(π_current(row)/π_behavior(row), 1)·A·log π_current where A < 0, the ratio
    detached.

    These are the paper's canonical limits a⁺ = b⁺ = b⁻ = 1, a⁻ = 0. Good answers are trained as in supervised training,
    however unlikely they have become; bad ones count less as the policy moves away from them, which bounds how far they
    are pushed down. The ratio is that of the whole row, Σ of its log-ratios in float64, not its geometric mean. It is
    relative to the sampler and replaces the behavior weights, which are not applied. Mark `clipped`: tokens whose ratio
    was cut to 1. A non-finite log-prob makes the losses of its row's tokens with negative advantage non-finite.
    """
    behind_N = tokens.current_logprobs_N.detach() - tokens.behavior_logprobs_N
    log_ratio_B = row_sums(behind_N.double(), tokens.lengths_B)
    negative_N = tokens.advantages_N < 0
    taper_B = log_ratio_B.clamp(max=0.0).exp().neg_().to(behind_N.dtype)
    factors_N = torch.where(negative_N, spread(taper_B, tokens.lengths_B), -1.0).mul_(tokens.advantages_N)
    clipped_N = spread(log_ratio_B > 0, tokens.lengths_B).logical_and_(negative_N)
    return LossTerms(factors_N * tokens.current_logprobs_N, {"clipped": clipped_N})
