"""Advantages relative to the other trajectories of the same prompt: GRPO and its variants. All tokens of a row get the
row's advantage.

R_i is a row's score (Σ of its rewards); μ and σ are the mean and standard deviation (Bessel's correction) of its group
of K rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tandem.protos.errors import DataError
from tandem.trainer.estimators.groups import Groups, centred, deviations
from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import DrGrpoOptions, GpgOptions, GrpoOptions, GrpoPasskOptions, MaxrlOptions

EPSILON = 1e-6
"""Added to σ."""


def grpo(batch: EstimatorBatch, options: GrpoOptions) -> Estimate:
    """(R_i − μ)/(σ + 1e-6). arXiv:2402.03300, eq. 3.

    With `std_over = "batch"`, σ is the standard deviation of all scores of the batch (Lite PPO, arXiv:2508.08221). A
    group of one keeps its score (μ = 0, and σ = 1 over groups); in a group without variance all advantages are 0.
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

    A group of one keeps its score; in a group without variance all advantages are 0.
    """
    return Estimate(batch.spread(centred(batch.scores_R, batch.groups)))


def grpo_passk(batch: EstimatorBatch, options: GrpoPasskOptions) -> Estimate:
    """R_(1) − R_(2) for the best row of a group, its lead over the second, divided by σ + 1e-6 if `divide_by_std`; 0
    for the others.

    arXiv:2503.19595. A tie for the best gives 0, hence also a group without variance. The registry refuses a group of
    one, which has no second row.
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
    """α·(R_i − μ)/f_norm, α = R/max(1, rows whose score is not 0). arXiv:2504.02546.

    A group of one keeps its score (times α/f_norm); in a group without variance all advantages are 0.
    """
    scores_R = batch.scores_R
    alpha = len(scores_R) / max(1, int(scores_R.count_nonzero()))
    return Estimate(batch.spread(centred(scores_R, batch.groups) * (alpha / options.f_norm)))


def maxrl(batch: EstimatorBatch, options: MaxrlOptions) -> Estimate:
    """(R_i − μ)/μ, 0 where μ = 0. With more samples it approaches the gradient of the log pass rate. arXiv:2602.02710,
    algorithm 1.

    The paper's rewards are 0 and 1, so μ is a success rate; this function accepts any non-negative reward. The registry
    refuses a group of one, whose advantage would always be 0. In a group without variance all advantages are 0.

    Raises:
        DataError: a score is negative, so that μ is no success rate.
    """
    scores_R, groups = batch.scores_R, batch.groups
    _refuse_negative(scores_R)
    means_R = groups.means(scores_R)[groups.of_row_R]
    advantages_R = (centred(scores_R, groups) / means_R).where(means_R > 0, 0.0)
    return Estimate(batch.spread(advantages_R))


def _refuse_negative(scores_R: Tensor) -> None:
    if len(scores_R) and float(scores_R.min()) < 0:
        row = int(scores_R.argmin())
        raise DataError(
            f"row {row} scores {float(scores_R[row]):g}, but maxrl divides by "
            "the mean score as if it were a success rate: "
            "give rewards of 0 to 1 (and keep the KL penalty out of them), or take another estimator"
        )
