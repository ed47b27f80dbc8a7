"""REINFORCE (Williams 1992), with GRPO-like advantages also called GPG (arXiv:2504.02546).

With behavior weight w, a token's loss is L = −w · A · log π_current, without ratio or clip. Only the weights correct
for off-policy samples.
"""

from __future__ import annotations

from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import ReinforceOptions


def reinforce(tokens: LossTokens, options: ReinforceOptions) -> LossTerms:
    """Has no marks: nothing is clipped."""
    return LossTerms(-(tokens.advantages_N * tokens.behavior_weights_N) * tokens.current_logprobs_N)
