"""Padded matrices to flat columns and back."""

from __future__ import annotations

import torch
from torch import Tensor


def flatten(values_BT: Tensor, mask_BT: Tensor) -> tuple[Tensor, Tensor]:
    """(values_N, lengths_B) of the positions where the mask is not 0. Differentiable."""
    assert values_BT.shape == mask_BT.shape, (values_BT.shape, mask_BT.shape)
    return values_BT[mask_BT.bool()], mask_BT.bool().sum(1)


def unflatten(values_N: Tensor, mask_BT: Tensor) -> Tensor:
    """The inverse of `flatten`, 0 where the mask is 0."""
    values_BT = torch.zeros(mask_BT.shape, dtype=values_N.dtype, device=values_N.device)
    return values_BT.masked_scatter(mask_BT.bool(), values_N)
