"""Rejection tests. A token that fails leaves the loss and its denominators.

A weight limits how much an outlier counts; rejection removes it ("When Speed Kills Stability", Liu, Li et al. 2025,
part 3: sequence masking; geometric masking, which does not penalise long rows; the veto of catastrophic tokens).
DeepSeek-V3.2 (arXiv:2512.02556) masks rows that drifted and have negative advantage: `negative_only`.

With z = log π_proximal − log π_behavior of a token sampled from π_behavior (Schulman, "Approximating KL divergence",
2020):

    ratio  e^z             bounds the trainer's probability over the sampler's
    k1     −z              the golden convention's bounds lo_hi are of the sampler's over the trainer's probability:
                           low = log lo, high = log hi
    k2     z²/2
    k3     e^z − 1 − z

N loss tokens, flat, of B rows (see trainer/batch/ragged.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.trainer.batch.ragged import row_maxima, row_means, row_sums, spread
from tandem.trainer.off_policy.options import RejectionOptions
from tandem.trainer.policy_losses.inputs import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True)
class Verdict:
    """Result of one test."""

    keep_N: Tensor
    """bool: whether the token passes."""
    greatest: Tensor
    """The value that `high` bounds, in the measure's unit: (N,) at level `token`, else (B,). Meaningless for an empty
    row.
    """
    least: Tensor
    """The value that `low` bounds; differs from `greatest` only for level `max`."""


def judge(
    log_ratio_N: Tensor, lengths_B: Tensor, options: RejectionOptions, advantages_N: Tensor | None = None
) -> Verdict:
    """Applies one test, in float64. `advantages_N` is needed with `negative_only`.

    k1, k2 and k3 clamp z to ±20 so that nothing becomes inf; `ratio` compares the unclamped logarithm.
    """
    in_logs = options.measure == "ratio"
    values_N = _values(log_ratio_N.double(), options.measure)
    greatest, least = _at_level(values_N, lengths_B, options.level)
    keep = torch.ones_like(greatest, dtype=torch.bool)
    if options.high is not None:
        keep &= greatest <= (math.log(options.high) if in_logs else options.high)
    if options.low is not None:
        keep &= least >= (math.log(options.low) if in_logs else options.low)
    keep_N = keep if options.level == "token" else spread(keep, lengths_B)
    if options.negative_only:
        assert advantages_N is not None and advantages_N.shape == log_ratio_N.shape, "negative_only needs advantages"
        keep_N = keep_N | (advantages_N >= 0)
    if in_logs:
        greatest, least = (value.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_() for value in (greatest, least))
    return Verdict(keep_N, greatest, least)


def _values(log_ratio_N: Tensor, measure: str) -> Tensor:
    """The measure of each token; for `ratio`, its logarithm."""
    if measure == "ratio":
        return log_ratio_N
    clamped_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    if measure == "k1":
        return clamped_N.neg_()
    if measure == "k2":
        return clamped_N.square_() / 2
    return torch.expm1(clamped_N).sub_(clamped_N)


def _at_level(values_N: Tensor, lengths_B: Tensor, level: str) -> tuple[Tensor, Tensor]:
    """(greatest, least): (N,) at level `token`, else (B,)."""
    if level == "max":
        return row_maxima(values_N, lengths_B), -row_maxima(-values_N, lengths_B)
    if level == "token":
        return values_N, values_N
    values_B = (row_sums if level == "sequence" else row_means)(values_N, lengths_B)
    return values_B, values_B
