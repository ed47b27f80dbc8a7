"""Statistics of groups (R rows of P groups, in any order), and whitening over all N loss tokens of the batch. Nothing
here loops over groups.

A group of one has mean 0 and standard deviation 1, as in the golden convention.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

WHITENING_EPSILON = 1e-8
"""Added to the variance, under the root."""


@dataclass(frozen=True, slots=True)
class Groups:
    """`of_row_R`: each row's group, numbered 0 … P − 1; `sizes_P`: number of rows of each group."""

    of_row_R: Tensor
    sizes_P: Tensor

    @classmethod
    def of(cls, labels_R: Tensor) -> Groups:
        """Rows with equal labels form a group."""
        _, of_row_R, sizes_P = torch.unique(labels_R, return_inverse=True, return_counts=True)
        return cls(of_row_R, sizes_P)

    @classmethod
    def whole(cls, rows_R: Tensor) -> Groups:
        """All rows in one group."""
        of_row_R = torch.zeros_like(rows_R, dtype=torch.int64)
        return cls(of_row_R, of_row_R.new_full((min(len(rows_R), 1),), len(rows_R)))

    @property
    def sizes_R(self) -> Tensor:
        """Number of rows in each row's group."""
        return self.sizes_P[self.of_row_R]

    def sums(self, values_R: Tensor) -> Tensor:
        """Σ over each group, (P,), or (P, C) of (R, C)."""
        zeros = values_R.new_zeros(len(self.sizes_P), *values_R.shape[1:])
        return zeros.index_add_(0, self.of_row_R, values_R)

    def means(self, values_R: Tensor) -> Tensor:
        """Mean over each group, (P,)."""
        return self.sums(values_R) / self.sizes_P

    def lowest(self, values_R: Tensor) -> Tensor:
        """Smallest value of each group, (P,)."""
        zeros_P = values_R.new_zeros(len(self.sizes_P))
        return zeros_P.scatter_reduce_(0, self.of_row_R, values_R, "amin", include_self=False)

    def ascending(self, values_R: Tensor) -> Tensor:
        """Row indices sorted by group, then by ascending value, (R,) int64. Ties keep the order of rows."""
        by_value_R = torch.sort(values_R, stable=True).indices
        return by_value_R[torch.sort(self.of_row_R[by_value_R], stable=True).indices]


def centred(values_R: Tensor, groups: Groups, *, weights_R: Tensor | None = None) -> Tensor:
    """value − mean of its group, (R,); exactly 0 where a group's values are equal; a group of one keeps its value.

    With weights (not negative) the mean is Σ weight·value / Σ weight; it is unspecified for a group whose weights are
    all 0.
    """
    # Subtracting the smallest value first makes equal values exactly 0; a mean alone could round.
    above_R = values_R - groups.lowest(values_R)[groups.of_row_R]
    if weights_R is None:
        means_P = groups.means(above_R)
    else:
        totals_P = groups.sums(weights_R)
        means_P = groups.sums(weights_R * above_R) / totals_P.where(totals_P > 0, 1)
    return torch.where(groups.sizes_R == 1, values_R, above_R - means_P[groups.of_row_R])


def deviations(centred_R: Tensor, groups: Groups) -> Tensor:
    """Standard deviation (Bessel's correction) of each row's group, (R,), from centred values; 1 in a group of one."""
    variances_P = groups.sums(centred_R.square()) / (groups.sizes_P - 1).clamp(min=1)
    return variances_P.sqrt().where(groups.sizes_P > 1, 1.0)[groups.of_row_R]


def whiten(values_N: Tensor) -> Tensor:
    """(x − ⟨x⟩)/√(Var(x) + 1e-8), (N,), Var with Bessel's correction; 0 for a single value or equal values. Longer rows
    count more.
    """
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
    return (squares / max(count - 1, 1) + WHITENING_EPSILON).rsqrt()
