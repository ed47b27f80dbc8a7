"""OPO: the baseline of minimal gradient variance if the gradient's norm grows with the length."""

from __future__ import annotations

from tandem.trainer.estimators.groups import centred
from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import OpoOptions


def opo(batch: EstimatorBatch, options: OpoOptions) -> Estimate:
    """R_i − Σ_j n_j·R_j / Σ_j n_j over the group, n the loss tokens of a row. arXiv:2505.23585.

    A group of one keeps its score; in a group without variance all advantages are 0.
    """
    lengths_R = batch.lengths_R.to(batch.rewards_N.dtype)
    return Estimate(batch.spread(centred(batch.scores_R, batch.groups, weights_R=lengths_R)))
