"""GSPO: one importance ratio per sequence (arXiv:2507.18071, its token form "GSPO-token").

With δ = log π_current − log π_proximal, its mean δ̄ over the row's loss tokens, behavior weight w and sg the
stop-gradient,

    s_t = exp(sg(δ̄) + log π_current − sg(log π_current)),   L_t = w · max(−s_t A, −clamp(s_t, 1 − low, 1 + high) A):

every token of the row has the value of the sequence's ratio and the gradient of its own log-prob. If advantages and
weights are constant over a row, the row's gradient equals that of the sequence form; otherwise only the token form is
defined.
"""

from __future__ import annotations

import torch

from tandem.trainer.batch.ragged import row_means, spread
from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import GspoOptions

MAX_LOG_SEQUENCE_RATIO = 10.0
"""Upper clamp of a row's mean log-ratio before the exponential."""


def gspo(tokens: LossTokens, options: GspoOptions) -> LossTerms:
    """Mark `clipped`: tokens of rows whose ratio the clip bounds. A row is a segment; means exclude rejected tokens."""
    mean_B = row_means(tokens.log_ratio_N.detach(), tokens.lengths_B)
    own_N = tokens.current_logprobs_N - tokens.current_logprobs_N.detach()
    ratio_N = (spread(mean_B, tokens.lengths_B) + own_N).clamp(max=MAX_LOG_SEQUENCE_RATIO).exp()
    unclipped_N = -tokens.advantages_N * ratio_N
    clipped_N = -tokens.advantages_N * ratio_N.clamp(1.0 - options.clip_low, 1.0 + options.clip_high)
    losses_N = torch.maximum(unclipped_N, clipped_N)
    return LossTerms(losses_N * tokens.behavior_weights_N, {"clipped": clipped_N.detach() > unclipped_N.detach()})
