"""ReMax: the baseline is what the policy's own greedy answer to the prompt scores."""

from __future__ import annotations

from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import RemaxOptions
from tandem.trainer.estimators.scans import discounted_sums


def remax(batch: EstimatorBatch, options: RemaxOptions) -> Estimate:
    """G_t − b_i, G_t = Σ_{s ≥ t} r_s the reward-to-go and b the score of the greedy answer; returns = G.
    arXiv:2310.10505.

    Groups play no part.
    """
    assert batch.baselines_R is not None
    returns_N = discounted_sums(batch.rewards_N, batch.lengths_R, 1.0)
    advantages_N = batch.spread(-batch.baselines_R.double()).add_(returns_N)
    return Estimate(advantages_N, returns_N)
