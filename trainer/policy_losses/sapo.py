"""SAPO: a soft gate in place of the clip (arXiv:2511.20347).

With ρ = π_current/π_proximal, σ the logistic function, behavior weight w, and τ chosen by the sign of the advantage, a
token's loss is

    L = −w · A · (4/τ) · σ(τ(ρ − 1)).

At ρ = 1 its gradient is REINFORCE's; it fades smoothly with the distance from 1. The paper aggregates with
`seq-mean-token-mean`.
"""

from __future__ import annotations

import torch

from tandem.trainer.policy_losses.inputs import LossTerms, LossTokens
from tandem.trainer.policy_losses.options import SapoOptions


def sapo(tokens: LossTokens, options: SapoOptions) -> LossTerms:
    """Has no marks: nothing is clipped."""
    positive_N = tokens.advantages_N > 0
    temperature_N = torch.where(positive_N, options.temperature_positive, options.temperature_negative)
    temperature_N = temperature_N.to(tokens.advantages_N.dtype)
    gate_N = torch.sigmoid(temperature_N * (tokens.importance_ratio_N - 1.0))
    return LossTerms(-4.0 * tokens.behavior_weights_N * tokens.advantages_N / temperature_N * gate_N)
