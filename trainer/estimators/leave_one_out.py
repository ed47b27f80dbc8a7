"""RLOO: a row's baseline is the mean of the other rows of its group."""

from __future__ import annotations

from tandem.trainer.estimators.groups import centred
from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import RlooOptions


def rloo(batch: EstimatorBatch, options: RlooOptions) -> Estimate:
    """R_i − mean of the group's other rows = K/(K − 1)·(R_i − μ). arXiv:2402.14740.

    A group of one keeps its score, or gets 0 with `group_of_one = "zero"`; in a group without variance all advantages
    are 0.
    """
    sizes_R = batch.groups.sizes_R
    alone = 1.0 if options.group_of_one == "score" else 0.0
    factor_R = (sizes_R / (sizes_R - 1).clamp(min=1)).where(sizes_R > 1, alone)
    return Estimate(batch.spread(centred(batch.scores_R, batch.groups) * factor_R))
