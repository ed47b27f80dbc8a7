"""Where proximal log-probs come from: the point around which the loss clips, and the numerator of the behavior weight.

N loss tokens, flat.
"""

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
    """Proximal log-probs without a forward pass, between the sampler's and the current ones; detached.

    A-3PO (arXiv:2512.06547, in AReaL `loglinear`), with the versions of the proximal (p), the current (c) and the
    token's own (b) policy:

        log π_proximal ≈ log π_behavior + α·(log π_current − log π_behavior),    α = (p − b)/(c − b), within [0, 1]

    `versions_N`, integers, are the versions that sampled each token; training the batch yields `batch_version`
    (`TrainBatch.policy_version`), so p = batch_version − 1. `progress` is the part of the batch's optimizer steps
    already taken: c = p + progress. The paper's c = p + 1 is progress 1; with the true one the first step, at which the
    current policy *is* the proximal one, is exact (α = 1 for every token). After it a fresh token keeps the sampler's
    log-prob (α = 0), and so does one of a version beyond p, which a run resumed from an earlier checkpoint meets.
    """
    assert current_logprobs_N.shape == behavior_logprobs_N.shape == versions_N.shape, (
        current_logprobs_N.shape,
        behavior_logprobs_N.shape,
        versions_N.shape,
    )
    assert 0.0 <= progress <= 1.0, progress
    current_N = current_logprobs_N.detach()
    age_N = (batch_version - 1 - versions_N).clamp(min=0).to(current_N.dtype)
    alpha_N = torch.where(age_N + progress > 0, age_N / (age_N + progress), 1.0)
    between_N = behavior_logprobs_N + alpha_N * (current_N - behavior_logprobs_N)
    return torch.where(alpha_N == 1.0, current_N, between_N)  # the sum may round


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
    """(what the loss takes as proximal, what `correct` takes as proximal), both detached, (N,).

    They differ only for `bypassed`: the loss's proximal policy is the sampler's, so that its ratio is
    π_current/π_behavior, and the correction is of that ratio. `recomputed_N` None stands for the current log-probs:
    before a batch's first optimizer step these are the proximal ones.
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
