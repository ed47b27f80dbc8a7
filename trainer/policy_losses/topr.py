"""Tapered off-policy REINFORCE (arXiv:2503.14286)."""

from __future__ import annotations

import torch

from tandem.trainer.batch.ragged import row_sums, spread
from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import ToprOptions


def topr(tokens: LossTokens, options: ToprOptions) -> LossTerms:
    """−A·log π_current where A ≥ 0, −min(π_current(row)/π_behavior(row), 1)·A·log π_current where A < 0, the ratio
    detached.

    The paper's canonical limits a⁺ = b⁺ = b⁻ = 1, a⁻ = 0: good answers are learnt as in supervised training, however
    unlikely they have become; bad ones ever less as the policy leaves them, so that pushing them down cannot go on for
    ever. The ratio is that of the whole row, Σ of its log-ratios in float64, not its geometric mean. It goes to the
    sampler itself and replaces the behavior weights, which are not applied. Marks: `clipped`, tokens whose ratio was
    cut to 1. A log-prob that is not finite makes the losses of its row so, where the advantage is negative.
    """
    behind_N = tokens.current_logprobs_N.detach() - tokens.behavior_logprobs_N
    log_ratio_B = row_sums(behind_N.double(), tokens.lengths_B)
    negative_N = tokens.advantages_N < 0
    taper_B = log_ratio_B.clamp(max=0.0).exp().neg_().to(behind_N.dtype)
    factors_N = torch.where(negative_N, spread(taper_B, tokens.lengths_B), -1.0).mul_(tokens.advantages_N)
    clipped_N = spread(log_ratio_B > 0, tokens.lengths_B).logical_and_(negative_N)
    return LossTerms(factors_N * tokens.current_logprobs_N, {"clipped": clipped_N})
