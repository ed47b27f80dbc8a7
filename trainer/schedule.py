"""The learning rate as a pure function of the batch, so that a resumed or replayed run needs no scheduler state."""

from __future__ import annotations

import math
from typing import Literal

FINAL_FRACTION = 0.1


def learning_rate(
    policy_version: int,
    *,
    peak: float,
    warmup_batches: int,
    total_batches: int,
    schedule: Literal["constant", "cosine"],
) -> float:
    """The learning rate of the batch that makes `policy_version` (the first is 1).

    It rises linearly to `peak` at batch `warmup_batches`. Then it stays constant, or falls along half a cosine to a
    tenth of `peak` at `total_batches` and stays there.
    """
    if policy_version < warmup_batches:
        return peak * policy_version / warmup_batches
    if schedule == "constant":
        return peak
    progress = (policy_version - warmup_batches) / max(1, total_batches - warmup_batches)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return peak * (FINAL_FRACTION + (1.0 - FINAL_FRACTION) * cosine)
