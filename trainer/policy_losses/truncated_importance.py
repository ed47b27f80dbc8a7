"""REINFORCE with the truncated sampler ratio: AIPO (LlamaRL arXiv:2505.24034), after IMPALA (arXiv:1802.01561)."""

from __future__ import annotations

from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO, LossTerms, LossTokens
from tandem.trainer.policy_losses.options import TruncatedImportanceOptions


def truncated_importance(tokens: LossTokens, options: TruncatedImportanceOptions) -> LossTerms:
    """−min(π_current/π_behavior, cap)·A·log π_current for each token, the ratio detached.

    A token above the cap keeps a gradient, unlike one that PPO clips. The ratio is relative to the sampler and replaces
    the behavior weights, which are not applied because they make the same correction. Mark `clipped`: ratios cut to the
    cap. A non-finite log-prob makes its token's loss non-finite.
    """
    log_ratio_N = (tokens.current_logprobs_N - tokens.behavior_logprobs_N).detach()
    ratio_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    losses_N = -ratio_N.clamp(max=options.cap) * tokens.advantages_N * tokens.current_logprobs_N
    return LossTerms(losses_N, {"clipped": ratio_N > options.cap})
