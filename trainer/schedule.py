"""The learning rate as a pure function of the batch, so that a resumed or replayed run needs no scheduler state."""

from __future__ import annotations

import math

from tandem.trainer.config import TrainerConfig

FINAL_FRACTION = 0.1


def learning_rate(config: TrainerConfig, policy_version: int, total_batches: int) -> float:
    """The learning rate of the batch that makes `policy_version` (the first is 1).

    It rises linearly to its peak at batch `warmup_batches`. Then it stays constant, or falls along half a cosine to a
    tenth of the peak at `total_batches` and stays there.
    """
    if policy_version < config.warmup_batches:
        return config.learning_rate * policy_version / config.warmup_batches
    if config.schedule == "constant":
        return config.learning_rate
    progress = (policy_version - config.warmup_batches) / max(1, total_batches - config.warmup_batches)
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return config.learning_rate * (FINAL_FRACTION + (1.0 - FINAL_FRACTION) * cosine)
