"""PKPO: advantages that maximise the best of k answers instead of the mean."""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import PkpoOptions
from tandem.trainer.estimators.scans import running_sums


def pkpo(batch: EstimatorBatch, options: PkpoOptions) -> Estimate:
    """K·s_i, s_i = Σ over the k-subsets I of the group with i of (max_I R − max_{I∖i} R) / C(K, k). arXiv:2505.15201,
    eq. 33 (loo−1).

    Σ s_i·∇log π is an unbiased gradient of E[max of k]; the factor K compensates for a loss that averages over rows.
    The advantage is thus k times the mean increase of the best score when the row joins k − 1 others. It is never
    negative, and 0 for a group's worst row and in a group without variance. The registry refuses groups smaller than k.
    """
    scores_R, groups = batch.scores_R, batch.groups
    order_R = groups.ascending(scores_R)
    sizes_R = groups.sizes_R[order_R]
    starts_P = groups.sizes_P.cumsum(0) - groups.sizes_P
    below_R = torch.arange(len(order_R), device=order_R.device) - starts_P[groups.of_row_R[order_R]]
    # Of the (k − 1)-subsets of the others, C(m, k − 1) lie entirely below the step from the m-th smallest score to the
    # next.
    steps_R = scores_R[order_R].diff(prepend=scores_R.new_zeros(1)) * _share_below(below_R, sizes_R, options.k - 1)
    gains_R = running_sums(steps_R, groups.sizes_P) * options.k
    return Estimate(batch.spread(torch.zeros_like(scores_R).index_copy_(0, order_R, gains_R)))


def _share_below(below_R: Tensor, sizes_R: Tensor, chosen: int) -> Tensor:
    """C(below, chosen)/C(size − 1, chosen); 0 for a group's smallest row."""
    share_R = torch.ones_like(below_R, dtype=torch.float64)
    for taken in range(chosen):
        share_R *= (below_R - taken).clamp(min=0) / (sizes_R - 1 - taken).clamp(min=1)
    return share_R
