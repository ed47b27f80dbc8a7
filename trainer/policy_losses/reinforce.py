"""Losses without an importance ratio to clip: REINFORCE, DRO, TOPR and truncated importance sampling.

w is the behavior weight. A non-finite log-prob makes its token's loss non-finite.
"""

from __future__ import annotations

import torch

from tandem.trainer.batch.ragged import row_sums, spread
from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO, LossTerms, LossTokens
from tandem.trainer.policy_losses.options import DroOptions, ReinforceOptions, ToprOptions, TruncatedImportanceOptions


def reinforce(tokens: LossTokens, options: ReinforceOptions) -> LossTerms:
    """−w · A · log π_current (Williams 1992), with GRPO-like advantages also called GPG (arXiv:2504.02546).

    Only the weights correct for off-policy samples. Has no marks: nothing is clipped.
    """
    return LossTerms(-(tokens.advantages_N * tokens.behavior_weights_N) * tokens.current_logprobs_N)


def dro(tokens: LossTokens, options: DroOptions) -> LossTerms:
    """w · (−A·log π_current + β/2·(log π_current − log π_proximal)²): direct reward optimisation (arXiv:2405.19107), in
    the form of Kimi k1.5's policy mirror descent (arXiv:2501.12599).

    The gradient is that of the squared error ½(A − β·log ratio)², divided by β. Tokens far from the current policy
    still have a gradient.
    """
    penalty_N = 0.5 * options.beta * tokens.log_ratio_N.square()
    return LossTerms((penalty_N - tokens.advantages_N * tokens.current_logprobs_N) * tokens.behavior_weights_N)


def topr(tokens: LossTokens, options: ToprOptions) -> LossTerms:
    """−A·log π_current where A ≥ 0, −min(π_current(row)/π_behavior(row), 1)·A·log π_current where A < 0, the ratio
    detached: tapered off-policy REINFORCE (arXiv:2503.14286) with a⁺ = b⁺ = b⁻ = 1, a⁻ = 0.

    Bad answers count less as the policy moves away from them, which bounds how far they are pushed down. The ratio is
    the product over the row (Σ of its log-ratios in float64), not its geometric mean; it replaces the behavior weights.
    Mark `clipped`: tokens whose ratio was cut to 1.
    """
    log_ratio_N = tokens.behavior_log_ratio_N.detach()
    log_ratio_B = row_sums(log_ratio_N.double(), tokens.lengths_B)
    negative_N = tokens.advantages_N < 0
    taper_B = log_ratio_B.clamp(max=0.0).exp().neg_().to(log_ratio_N.dtype)
    factors_N = torch.where(negative_N, spread(taper_B, tokens.lengths_B), -1.0).mul_(tokens.advantages_N)
    clipped_N = spread(log_ratio_B > 0, tokens.lengths_B).logical_and_(negative_N)
    return LossTerms(factors_N * tokens.current_logprobs_N, {"clipped": clipped_N})


def truncated_importance(tokens: LossTokens, options: TruncatedImportanceOptions) -> LossTerms:
    """−min(π_current/π_behavior, cap)·A·log π_current, the ratio detached: AIPO (LlamaRL arXiv:2505.24034), after
    IMPALA (arXiv:1802.01561).

    A token above the cap keeps a gradient, unlike one that PPO clips. The ratio replaces the behavior weights. Mark
    `clipped`: ratios cut to the cap.
    """
    ratio_N = tokens.behavior_log_ratio_N.detach().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses_N = -ratio_N.clamp(max=options.cap) * tokens.advantages_N * tokens.current_logprobs_N
    return LossTerms(losses_N, {"clipped": ratio_N > options.cap})
