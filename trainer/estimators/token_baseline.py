"""The optimal token baseline: at every token, the group's rewards-to-go weighted by the gradient energy that each row
has accumulated so far.

With π the proximal probability of the token, Σπ² the sum of squared probabilities over the vocabulary, and ŵ the
behavior weight (0 if rejected):

    e_t = (1 − 2π_t + Σπ²)·ŵ_t²    W_t = Σ_{s ≤ t} e_s    b_t = Σ_j G_jt·W_jt / (Σ_j W_jt + 1e-8)    A_t = G_t − b_t

over the rows j of the group that have a loss token at t, G the reward-to-go. arXiv:2602.07078. In a group of one b is
0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.trainer.estimators.groups import Groups
from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import OptimalTokenBaselineOptions, TirOptimalTokenBaselineOptions
from tandem.trainer.estimators.scans import discounted_sums, running_sums

EPSILON = 1e-8
"""Added to the group's total weight."""


def optimal_token_baseline(batch: EstimatorBatch, options: OptimalTokenBaselineOptions) -> Estimate:
    """t is the token's position in the response, counting tool tokens (`columns_N`).

    If one row of a group is strictly the longest, its tail would be its own baseline; with `handle_zero_tail`, b = 0
    from the position that equals the second longest row's number of loss tokens (the golden convention, also for rows
    with gaps).
    """
    assert batch.columns_N is not None
    return _estimate(batch, batch.columns_N.clone(), _cutoffs(batch, batch.groups.sizes_P, options.handle_zero_tail))


def tir_optimal_token_baseline(batch: EstimatorBatch, options: TirOptimalTokenBaselineOptions) -> Estimate:
    """t is the token's index among its row's loss tokens, so rows with tool calls are compared token by token.

    Otherwise like `optimal_token_baseline`, except that rows without loss tokens do not count in their group.
    """
    starts_R = batch.lengths_R.cumsum(0) - batch.lengths_R
    ranks_N = batch.spread(starts_R).neg_().add_(torch.arange(len(batch.rewards_N), device=starts_R.device))
    present_P = batch.groups.sums((batch.lengths_R > 0).long())
    return _estimate(batch, ranks_N, _cutoffs(batch, present_P, options.handle_zero_tail))


def _estimate(batch: EstimatorBatch, columns_N: Tensor, cutoffs_R: Tensor) -> Estimate:
    assert batch.logprobs_N is not None and batch.squared_probs_N is not None
    returns_N = discounted_sums(batch.rewards_N, batch.lengths_R, 1.0)
    if not len(returns_N):
        return Estimate(returns_N, returns_N)
    energy_N = batch.logprobs_N.double().exp().mul_(-2.0).add_(batch.squared_probs_N).add_(1.0)
    if batch.behavior_weights_N is not None:
        energy_N.mul_(batch.behavior_weights_N).mul_(batch.behavior_weights_N)
    weights_N = running_sums(energy_N, batch.lengths_R)
    width = int(columns_N.max()) + 1
    # One cell per group and position; a token's cell number is its index.
    cells_N = columns_N.add_(batch.spread(batch.groups.of_row_R * width))
    num_cells = width * len(batch.groups.sizes_P)
    totals = torch.bincount(cells_N, weights_N, num_cells)
    baselines = torch.bincount(cells_N, weights_N.mul_(returns_N), num_cells).div_(totals.add_(EPSILON))
    baselines_N = baselines.index_select(0, cells_N)
    tail_N = cells_N >= batch.spread(batch.groups.of_row_R * width + cutoffs_R.clamp(max=width))
    return Estimate(torch.sub(returns_N, baselines_N.masked_fill_(tail_N, 0.0), out=baselines_N), returns_N)


def _cutoffs(batch: EstimatorBatch, counted_P: Tensor, handle_zero_tail: bool) -> Tensor:
    """The position from which a row's baseline is 0, (R,): 0 in a group of one, beyond all positions where nothing is
    cut.
    """
    groups, lengths_R = batch.groups, batch.lengths_R
    never = torch.iinfo(torch.int64).max
    cutoffs_R = torch.full_like(lengths_R, never).where(counted_P[groups.of_row_R] > 1, 0)
    if handle_zero_tail:
        longest_P, second_P, longest_row_P = _two_longest(lengths_R, groups)
        strict_P = (longest_P > second_P) & (counted_P > 1)
        cutoffs_R[longest_row_P[strict_P]] = second_P[strict_P]
    return cutoffs_R


def _two_longest(lengths_R: Tensor, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    """Largest and second largest length of each group, and the row of the largest."""
    order_R = groups.ascending(lengths_R)
    last_P = groups.sizes_P.cumsum(0) - 1
    longest_row_P, second_row_P = order_R[last_P], order_R[(last_P - 1).clamp(min=0)]
    return lengths_R[longest_row_P], lengths_R[second_row_P], longest_row_P
