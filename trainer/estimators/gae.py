"""Generalised advantage estimation with a critic's values."""

from __future__ import annotations

from torch import Tensor

from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import GaeOptions
from tandem.trainer.estimators.scans import discounted_sums
from tandem.trainer.estimators.whitening import whiten


def gae(batch: EstimatorBatch, options: GaeOptions) -> Estimate:
    """Δ_t = r_t + γ·V_k − V_t, Â_t = Δ_t + γλ·Â_k, k the row's next loss token (0 after the last). arXiv:1506.02438.

    Gaps (tool tokens) are skipped without discount. Advantages = Wh(Â). Returns = Â + V, with `critic_lam` as λ if it
    is set (VC-PPO, arXiv:2503.01491). Groups are ignored.
    """
    assert batch.values_N is not None
    values_N = batch.values_N.double()
    deltas_N = _temporal_differences(batch.rewards_N, values_N, batch.lengths_R, options.gamma)
    advantages_N = discounted_sums(deltas_N, batch.lengths_R, options.gamma * options.lam)
    if options.critic_lam is None:
        returns_N = advantages_N + values_N
    else:
        returns_N = discounted_sums(deltas_N, batch.lengths_R, options.gamma * options.critic_lam).add_(values_N)
    return Estimate(whiten(advantages_N) if options.whiten else advantages_N, returns_N)


def _temporal_differences(rewards_N: Tensor, values_N: Tensor, lengths_R: Tensor, gamma: float) -> Tensor:
    deltas_N = rewards_N - values_N
    last_R = (lengths_R.cumsum(0) - 1)[lengths_R > 0]
    last_deltas_R = deltas_N[last_R]
    # Adds the next token's value everywhere, then restores each row's last token, which has no next one.
    deltas_N[:-1].add_(values_N[1:], alpha=gamma)
    return deltas_N.index_copy_(0, last_R, last_deltas_R)
