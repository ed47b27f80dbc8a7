"""REINFORCE++ and its variant with a group's mean as the baseline. arXiv:2501.03262."""

from __future__ import annotations

from tandem.trainer.estimators.groups import centred
from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import ReinforcePlusPlusBaselineOptions, ReinforcePlusPlusOptions
from tandem.trainer.estimators.scans import discounted_sums
from tandem.trainer.estimators.whitening import whiten, whiten_rows


def reinforce_plus_plus(batch: EstimatorBatch, options: ReinforcePlusPlusOptions) -> Estimate:
    """Wh(G), G_t = r_t + γ·G_{t+1} over the row's loss tokens (gaps are skipped without discount); returns = G.

    Without whitening and with γ = 1 this is plain REINFORCE. Groups are ignored.
    """
    returns_N = discounted_sums(batch.rewards_N, batch.lengths_R, options.gamma)
    return Estimate(whiten(returns_N) if options.whiten else returns_N, returns_N)


def reinforce_plus_plus_baseline(batch: EstimatorBatch, options: ReinforcePlusPlusBaselineOptions) -> Estimate:
    """Wh(R_i − μ) on every token, μ the mean of the row's group.

    A group of one keeps its score before whitening; a group without variance has 0.
    """
    advantages_R = centred(batch.scores_R, batch.groups)
    if options.whiten:
        advantages_R = whiten_rows(advantages_R, batch.lengths_R)
    return Estimate(batch.spread(advantages_R))
