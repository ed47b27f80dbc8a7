"""Proximal log-probs: the centre of the loss's clip and the numerator of the behavior weight. N loss tokens, flat."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def loglinear_proximal(
    current_logprobs_N: Tensor,
    behavior_logprobs_N: Tensor,
    versions_N: Tensor,
    *,
    batch_version: int,
    progress: float = 1.0,
) -> Tensor:
    """Proximal log-probs interpolated between the sampler's and the current ones, without a forward pass; detached.

    A-3PO (arXiv:2512.06547, in AReaL `loglinear`), with the versions of the proximal (p), the current (c) and the
    token's own (b) policy:

        log π_proximal ≈ log π_behavior + α·(log π_current − log π_behavior),    α = (p − b)/(c − b), within [0, 1]

    `versions_N` (integers) sampled each token. Training the batch yields `batch_version`, so p = batch_version − 1.
    `progress` is the fraction of the batch's optimizer steps already taken, and c = p + progress; the paper's c = p + 1
    is progress 1. At progress 0 the result is exactly the current one. Later, a token of version p or newer (after a
    resume from an earlier checkpoint) keeps the sampler's log-prob.
    """
    assert 0.0 <= progress <= 1.0, progress
    current_N = current_logprobs_N.detach()
    age_N = (batch_version - 1 - versions_N).clamp(min=0).to(current_N.dtype)
    alpha_N = torch.where(age_N + progress > 0, age_N / (age_N + progress), 1.0)
    between_N = behavior_logprobs_N + alpha_N * (current_N - behavior_logprobs_N)
    return torch.where(alpha_N == 1.0, current_N, between_N)  # exact: the interpolation may round


def proximal_logprobs(
    method: Literal["recomputed", "loglinear", "bypassed"],
    *,
    current_logprobs_N: Tensor,
    behavior_logprobs_N: Tensor,
    recomputed_N: Tensor | None = None,
    versions_N: Tensor | None = None,
    batch_version: int = 0,
    progress: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """(proximal log-probs for the loss, proximal log-probs for `correct`), both detached, (N,).

    They differ only for `bypassed`, so that loss and correction both have the ratio π_current/π_behavior. If
    `recomputed_N` is None the current log-probs are used: before a batch's first optimizer step they are equal.
    """
    current_N = current_logprobs_N.detach()
    if method == "bypassed":
        return behavior_logprobs_N, current_N
    if method == "loglinear":
        assert versions_N is not None, "loglinear needs the version of every token"
        proximal_N = loglinear_proximal(
            current_N, behavior_logprobs_N, versions_N, batch_version=batch_version, progress=progress
        )
    else:
        proximal_N = current_N if recomputed_N is None else recomputed_N.detach()
    return proximal_N, proximal_N
