"""What to do about samples that another distribution than the trainer's drew: stale weights, other kernels.

Decoupled PPO (arXiv:2110.00641, for language models AReaL arXiv:2505.24298) splits the importance ratio in two:
π_current/π_behavior = π_current/π_proximal · π_proximal/π_behavior. The loss clips the first, this module gives the second:
the behavior weight, a constant of the optimisation, truncated from above (arXiv:2508.03501 and others call it TIS).
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to ±20 before the exponential, so that no token gives inf."""


def behavior_weights(proximal_logprobs: Tensor, behavior_logprobs: Tensor, *, cap: float) -> Tensor:
    """min(π_proximal/π_behavior, cap), token by token, detached. Any shape."""
    ratio = (proximal_logprobs.detach() - behavior_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    return ratio.clamp(max=cap)


def correction_sums(
    proximal_logprobs_N: Tensor, behavior_logprobs_N: Tensor, weights_N: Tensor, *, cap: float
) -> dict[str, Tensor]:
    """Sums over N loss tokens, from which the metrics of a batch are made however it was cut up.

    `kl` sums e^z − z − 1 with z = log π_proximal − log π_behavior: the k3 estimator of KL(π_behavior ‖ π_proximal), never negative
    (Schulman, "Approximating KL divergence", 2020).
    """
    log_ratio_N = (proximal_logprobs_N.detach() - behavior_logprobs_N).double()
    clamped_N = log_ratio_N.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weights_N = weights_N.double()
    return {
        "kl": (torch.expm1(clamped_N) - clamped_N).sum(),
        "weight": weights_N.sum(),
        "weight_squared": weights_N.square().sum(),
        "truncated": (clamped_N.exp() > cap).double().sum(),
    }
