"""Inputs and results of policy losses. N loss tokens, flat, of B rows (see trainer/batch/ragged.py)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import torch
from torch import Tensor

from tandem.trainer.batch.ragged import keep_tokens

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before the exponential, so that no token gives inf."""


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The loss tokens of whole rows, of a micro-batch or (for a selection) of the whole batch.

    Only `current_logprobs_N` carries gradient. Tokens rejected by the off-policy correction are already removed.
    """

    current_logprobs_N: Tensor
    proximal_logprobs_N: Tensor
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    behavior_weights_N: Tensor
    lengths_B: Tensor
    chosen_N: Tensor | None = None
    """bool: tokens chosen by the loss's selection over the batch; None if the loss has none."""

    def __post_init__(self) -> None:
        shape = self.current_logprobs_N.shape
        assert len(shape) == 1, shape
        for column in fields(self):
            value = getattr(self, column.name)
            assert column.name == "lengths_B" or value is None or value.shape == shape, (column.name, shape)

    def kept(self, keep_N: Tensor) -> LossTokens:
        """The tokens for which the mask holds."""
        columns = {
            column.name: value[keep_N]
            for column in fields(self)
            if column.name != "lengths_B" and (value := getattr(self, column.name)) is not None
        }
        return LossTokens(**columns, lengths_B=keep_tokens(self.lengths_B, keep_N))

    @property
    def log_ratio_N(self) -> Tensor:
        """log π_current − log π_proximal, not clamped."""
        return self.current_logprobs_N - self.proximal_logprobs_N

    @property
    def importance_ratio_N(self) -> Tensor:
        """π_current/π_proximal, its logarithm clamped to ±20."""
        return self.log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    @property
    def behavior_log_ratio_N(self) -> Tensor:
        """log π_current − log π_behavior, not clamped."""
        return self.current_logprobs_N - self.behavior_logprobs_N


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of every token with behavior weights, before aggregation."""

    losses_N: Tensor
    marks: dict[str, Tensor] = field(default_factory=dict)
    """name → float or bool for every token, detached, reported as means over tokens; `clipped`: tokens whose gradient
    the loss bounded.
    """


def policy_loss_sum(terms: LossTerms, shares_N: Tensor) -> Tensor:
    """Σ share · loss: a micro-batch's part of the loss of its optimizer step (see trainer/aggregation.py)."""
    assert terms.losses_N.shape == shares_N.shape, (terms.losses_N.shape, shares_N.shape)
    return torch.dot(terms.losses_N, shares_N)
