"""Direct reward optimisation (arXiv:2405.19107), in the form of Kimi k1.5's policy mirror descent
(arXiv:2501.12599).
"""

from __future__ import annotations

from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import DroOptions


def dro(tokens: LossTokens, options: DroOptions) -> LossTerms:
    """(−A·log π_current + β/2·(log π_current − log π_proximal)²)·w, w the behavior weight.

    The gradient is that of the squared error ½(A − β·log ratio)², divided by β. It is neither clipped nor weighted by a
    ratio, so tokens far from the current policy still have a gradient. A non-finite log-prob makes its token's loss
    non-finite.
    """
    penalty_N = 0.5 * options.beta * tokens.log_ratio_N.square()
    return LossTerms((penalty_N - tokens.advantages_N * tokens.current_logprobs_N) * tokens.behavior_weights_N)
