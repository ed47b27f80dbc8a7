"""What learning one batch gave, in figures of the whole batch: sums over all micro-batches and ranks first, ratios last."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, distributed

_SUMS = ("tokens", "loss", "clipped", "kl", "weight", "weight_squared", "truncated")


class TokenSums:
    """Sums over loss tokens on one rank, until `reduce` adds them up over all. The device is not synchronised before."""

    def __init__(self, device: torch.device) -> None:
        self._sums = torch.zeros(len(_SUMS), dtype=torch.float64, device=device)
        self._max_weight = torch.zeros(1, dtype=torch.float64, device=device)

    def add(self, sums: Mapping[str, Tensor], weights_N: Tensor) -> None:
        """Adds one micro-batch: the sums of `policy_loss` and `correction_sums`, and the behavior weights."""
        values = {
            **sums,
            "tokens": torch.tensor(float(weights_N.numel()), dtype=torch.float64, device=weights_N.device),
        }
        self._sums += torch.stack([values[name] for name in _SUMS])
        if weights_N.numel():
            self._max_weight = torch.maximum(self._max_weight, weights_N.max().double())

    def reduce(self) -> dict[str, float]:
        """The figures of the batch; every rank enters and gets the same.

        `behavior_proximal_kl`: mean of e^z − 1 − z with z = log π_proximal − log π_behavior (k3, estimates KL(behavior ‖ proximal)).
        `effective_sample_size`: ⟨w⟩²/⟨w²⟩ of the truncated weights, 1 if all are equal. `truncated_fraction`: tokens whose ratio was
        above the cap. `clipped_fraction`: tokens whose importance ratio the loss clipped. `loss` sums over optimizer steps.
        """
        if distributed.get_world_size() > 1:
            distributed.all_reduce(self._sums)
            distributed.all_reduce(self._max_weight, distributed.ReduceOp.MAX)
        sums = dict(zip(_SUMS, self._sums.tolist(), strict=True))
        tokens = max(1.0, sums["tokens"])
        squared = sums["weight_squared"]
        return {
            "loss": sums["loss"],
            "behavior_proximal_kl": sums["kl"] / tokens,
            "effective_sample_size": sums["weight"] ** 2 / (tokens * squared) if squared else 1.0,
            "truncated_fraction": sums["truncated"] / tokens,
            "clipped_fraction": sums["clipped"] / tokens,
            "behavior_weight_mean": sums["weight"] / tokens,
            "behavior_weight_max": float(self._max_weight),
        }


def finite(metrics: Mapping[str, float]) -> dict[str, float]:
    """Without what is not a number: JSON has no NaN, and `skipped_steps` says that a gradient was not finite."""
    return {name: value for name, value in metrics.items() if math.isfinite(value)}
