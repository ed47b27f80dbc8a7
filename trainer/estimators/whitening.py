"""Whitening to mean 0 and variance 1 over all loss tokens of the batch; longer rows therefore count more.

    Wh(x) = (x − ⟨x⟩)/√(Var(x) + 1e-8), Var with Bessel's correction

A single value, or equal values, become 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

EPSILON = 1e-8
"""Added to the variance, under the root."""


def whiten(values_N: Tensor) -> Tensor:
    """Wh(x), (N,)."""
    if not len(values_N):
        return values_N.clone()
    centred_N = values_N - values_N.mean()
    return centred_N.mul_(_scale(torch.dot(centred_N, centred_N), len(values_N)))


def whiten_rows(values_R: Tensor, lengths_R: Tensor) -> Tensor:
    """Wh of values that all tokens of a row share, (R,): the same as whitening all N tokens, at the cost of R."""
    num_tokens = int(lengths_R.sum())
    mean = torch.dot(values_R, lengths_R.to(values_R.dtype)) / max(num_tokens, 1)
    centred_R = values_R - mean
    return centred_R * _scale(torch.dot(centred_R.square(), lengths_R.to(values_R.dtype)), num_tokens)


def _scale(squares: Tensor, count: int) -> Tensor:
    return (squares / max(count - 1, 1) + EPSILON).rsqrt()
