"""Advantages relative to the other trajectories of the same prompt. All tokens of a row get the row's advantage.

R_i is a row's score (Σ of its rewards); μ and σ are the mean and standard deviation (Bessel's correction) of its group
of K rows. A group of one keeps its score (μ = 0, σ = 1) unless the registry refuses it. In a group without variance all
advantages are 0. Wh(·) whitens over the batch's tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.protos.errors import DataError
from tandem.trainer.estimators.groups import Groups, centred, deviations, whiten_rows
from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import (
    DrGrpoOptions,
    GdpoOptions,
    GpgOptions,
    GrpoOptions,
    GrpoPasskOptions,
    MaxrlOptions,
    OpoOptions,
    PkpoOptions,
    ReinforcePlusPlusBaselineOptions,
    RlooOptions,
)
from tandem.trainer.estimators.scans import running_sums

EPSILON = 1e-6
"""Added to σ."""


def grpo(batch: EstimatorBatch, options: GrpoOptions) -> Estimate:
    """(R_i − μ)/(σ + 1e-6). arXiv:2402.03300, eq. 3.

    With `std_over = "batch"`, σ is the standard deviation of all scores of the batch (Lite PPO, arXiv:2508.08221).
    """
    centred_R = centred(batch.scores_R, batch.groups)
    if options.std_over == "group":
        deviations_R = deviations(centred_R, batch.groups)
    else:
        whole = Groups.whole(batch.scores_R)
        deviations_R = deviations(centred(batch.scores_R, whole), whole)
    return Estimate(batch.spread(centred_R / (deviations_R + EPSILON)))


def dr_grpo(batch: EstimatorBatch, options: DrGrpoOptions) -> Estimate:
    """R_i − μ: GRPO without the division by σ, which favours prompts that are almost always or never solved.
    arXiv:2503.20783.
    """
    return Estimate(batch.spread(centred(batch.scores_R, batch.groups)))


def grpo_passk(batch: EstimatorBatch, options: GrpoPasskOptions) -> Estimate:
    """R_(1) − R_(2) for the best row of a group, its lead over the second, divided by σ + 1e-6 if `divide_by_std`; 0
    for the others. A tie for the best gives 0. arXiv:2503.19595.
    """
    scores_R, groups = batch.scores_R, batch.groups
    best_P = groups.sizes_P.cumsum(0) - 1
    order_R = groups.ascending(scores_R)
    first_P, second_P = order_R[best_P], order_R[(best_P - 1).clamp(min=0)]
    lead_P = (scores_R[first_P] - scores_R[second_P]).where(groups.sizes_P > 1, 0.0)
    if options.divide_by_std:
        lead_P = lead_P / (deviations(centred(scores_R, groups), groups)[first_P] + EPSILON)
    return Estimate(batch.spread(torch.zeros_like(scores_R).index_copy_(0, first_P, lead_P)))


def gpg(batch: EstimatorBatch, options: GpgOptions) -> Estimate:
    """α·(R_i − μ)/f_norm, α = R/max(1, rows whose score is not 0). arXiv:2504.02546."""
    scores_R = batch.scores_R
    alpha = len(scores_R) / max(1, int(scores_R.count_nonzero()))
    return Estimate(batch.spread(centred(scores_R, batch.groups) * (alpha / options.f_norm)))


def maxrl(batch: EstimatorBatch, options: MaxrlOptions) -> Estimate:
    """(R_i − μ)/μ, 0 where μ = 0. With more samples it approaches the gradient of the log pass rate. arXiv:2602.02710,
    algorithm 1, whose rewards are 0 and 1; any reward that is not negative is accepted. Raises DataError if a score is
    negative, so that μ is no success rate.
    """
    scores_R, groups = batch.scores_R, batch.groups
    if len(scores_R) and float(scores_R.min()) < 0:
        raise DataError(
            f"row {int(scores_R.argmin())} scores {float(scores_R.min()):g}, but maxrl divides by the mean score as if "
            "it were a success rate: give rewards of 0 to 1 (and keep the KL penalty out of them), or take another "
            "estimator"
        )
    means_R = groups.means(scores_R)[groups.of_row_R]
    return Estimate(batch.spread((centred(scores_R, groups) / means_R).where(means_R > 0, 0.0)))


def rloo(batch: EstimatorBatch, options: RlooOptions) -> Estimate:
    """R_i − mean of the group's other rows = K/(K − 1)·(R_i − μ). A group of one gets 0 with `group_of_one = "zero"`.
    arXiv:2402.14740.
    """
    sizes_R = batch.groups.sizes_R
    alone = 1.0 if options.group_of_one == "score" else 0.0
    factor_R = (sizes_R / (sizes_R - 1).clamp(min=1)).where(sizes_R > 1, alone)
    return Estimate(batch.spread(centred(batch.scores_R, batch.groups) * factor_R))


def opo(batch: EstimatorBatch, options: OpoOptions) -> Estimate:
    """R_i − Σ_j n_j·R_j / Σ_j n_j over the group, n the loss tokens of a row: the baseline of minimal gradient variance
    if the gradient's norm grows with the length. arXiv:2505.23585.
    """
    lengths_R = batch.lengths_R.to(batch.rewards_N.dtype)
    return Estimate(batch.spread(centred(batch.scores_R, batch.groups, weights_R=lengths_R)))


def pkpo(batch: EstimatorBatch, options: PkpoOptions) -> Estimate:
    """K·s_i, s_i = Σ over the k-subsets I of the group with i of (max_I R − max_{I∖i} R) / C(K, k). arXiv:2505.15201,
    eq. 33 (loo−1).

    Σ s_i·∇log π is an unbiased gradient of E[max of k]; the factor K compensates for a loss that averages over rows.
    The advantage is thus k times the mean increase of the best score when the row joins k − 1 others, and 0 for a
    group's worst row.
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


def reinforce_plus_plus_baseline(batch: EstimatorBatch, options: ReinforcePlusPlusBaselineOptions) -> Estimate:
    """Wh(R_i − μ): REINFORCE++ with the group's mean as the baseline. arXiv:2501.03262."""
    advantages_R = centred(batch.scores_R, batch.groups)
    return Estimate(batch.spread(whiten_rows(advantages_R, batch.lengths_R) if options.whiten else advantages_R))


def gdpo(batch: EstimatorBatch, options: GdpoOptions) -> Estimate:
    """Wh(Σ_c w_c·(R_ic − μ_c)/(σ_c + 1e-6)), every reward component c normalised over its group as in GRPO.
    arXiv:2601.05242. `rewards_N` is not read. Raises DataError if the number of components differs from the number of
    weights.
    """
    assert batch.components_RC is not None
    components_CR = batch.components_RC.double().unbind(1)
    weights = options.weights or (1.0,) * len(components_CR)
    if len(weights) != len(components_CR):
        raise DataError(f"gdpo has {len(weights)} weights for {len(components_CR)} reward components")
    total_R = torch.zeros_like(batch.scores_R)
    for weight, component_R in zip(weights, components_CR, strict=True):
        centred_R = centred(component_R, batch.groups)
        if options.divide_by_std:
            centred_R = centred_R / (deviations(centred_R, batch.groups) + EPSILON)
        total_R = total_R + weight * centred_R
    return Estimate(batch.spread(whiten_rows(total_R, batch.lengths_R) if options.whiten else total_R))
