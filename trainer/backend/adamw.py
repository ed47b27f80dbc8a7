"""AdamW that clips by the global gradient norm and skips a step whose norm is not finite."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tandem.trainer.config import TrainerConfig


class ClippingAdamW(torch.optim.AdamW):
    """`overflow` says whether the last step was skipped; `_global_grad_norm` is its norm before clipping. The names are
    DeepSpeed's.
    """

    overflow = False
    _global_grad_norm = 0.0
    max_norm = 0.0

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]  # no caller passes a closure
        parameters = [
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self.overflow = not bool(torch.isfinite(norm))
        self._global_grad_norm = float(norm)
        if self.overflow:
            return
        if self.max_norm:
            nn.utils.clip_grads_with_norm_(parameters, self.max_norm, norm)
        super().step(closure)


def adamw_arguments(config: TrainerConfig) -> dict[str, Any]:
    """Arguments of torch's AdamW; the learning rate is set before every step."""
    return {"lr": 0.0, "betas": config.adam_betas, "weight_decay": config.weight_decay, "fused": True}


def clipping_adamw(config: TrainerConfig, parameters: Iterable[nn.Parameter]) -> ClippingAdamW:
    """A `ClippingAdamW` as configured."""
    optimizer = ClippingAdamW(parameters, **adamw_arguments(config))
    optimizer.max_norm = config.gradient_clip
    return optimizer
