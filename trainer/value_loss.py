"""The critic's loss (PPO, arXiv:1707.06347, with the clipping of its published implementation).

N: loss tokens, flat. The caller weights tokens by their share (trainer/aggregation.py).
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.trainer.policy_losses.inputs import LossTerms


def clipped_value_loss(values_N: Tensor, returns_N: Tensor, start_values_N: Tensor, *, clip: float) -> LossTerms:
    """½·max((v − R)², (v_c − R)²) of every token, v_c = v clamped to v₀ ± clip around the value v₀ at the batch's
    start.

    Only `values_N` carries gradient; there is none where the clamped term is larger (mark `clipped`). An infinite
    `clip` gives the squared error. A NaN argument makes the token's loss NaN, so the critic's optimizer step is skipped
    and counted.
    """
    assert values_N.ndim == 1, values_N.shape
    assert values_N.shape == returns_N.shape == start_values_N.shape, (values_N.shape, returns_N.shape)
    assert clip > 0, clip
    returns_N, start_values_N = returns_N.detach(), start_values_N.detach()
    clipped_values_N = torch.clamp(values_N, start_values_N - clip, start_values_N + clip)
    errors_N = (values_N - returns_N).square()
    clipped_errors_N = (clipped_values_N - returns_N).square()
    return LossTerms(
        losses_N=torch.maximum(errors_N, clipped_errors_N) / 2,
        marks={"clipped": (clipped_errors_N > errors_N).detach()},
    )
