"""ReMax: the baseline is the score of the policy's own greedy answer to the prompt."""

from __future__ import annotations

from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import RemaxOptions
from tandem.trainer.estimators.scans import discounted_sums


def remax(batch: EstimatorBatch, options: RemaxOptions) -> Estimate:
    """G_t − b_i, G_t = Σ_{s ≥ t} r_s the reward-to-go and b_i the score of the greedy answer; returns = G.
    arXiv:2310.10505.

    Groups are ignored.
    """
    assert batch.baselines_R is not None
    returns_N = discounted_sums(batch.rewards_N, batch.lengths_R, 1.0)
    advantages_N = batch.spread(-batch.baselines_R.double()).add_(returns_N)
    return Estimate(advantages_N, returns_N)
