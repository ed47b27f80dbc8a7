"""Estimators that look at the rewards still to come in a row and ignore groups: GAE, REINFORCE++ and ReMax.

t runs over a row's loss tokens; gaps (tool tokens) are skipped without discount. Wh(·) whitens over the batch's tokens.
"""

from __future__ import annotations

from torch import Tensor

from tandem.trainer.estimators.groups import whiten
from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import GaeOptions, ReinforcePlusPlusOptions, RemaxOptions
from tandem.trainer.estimators.scans import discounted_sums


def gae(batch: EstimatorBatch, options: GaeOptions) -> Estimate:
    """Wh(Â), Δ_t = r_t + γ·V_{t+1} − V_t, Â_t = Δ_t + γλ·Â_{t+1}, with a critic's values V (0 after the last token).
    arXiv:1506.02438.

    Returns = Â + V, with `critic_lam` as λ if it is set (VC-PPO, arXiv:2503.01491).
    """
    assert batch.values_N is not None
    values_N = batch.values_N.double()
    deltas_N = temporal_differences(batch.rewards_N, values_N, batch.lengths_R, options.gamma)
    advantages_N = discounted_sums(deltas_N, batch.lengths_R, options.gamma * options.lam)
    if options.critic_lam is None:
        returns_N = advantages_N + values_N
    else:
        returns_N = discounted_sums(deltas_N, batch.lengths_R, options.gamma * options.critic_lam).add_(values_N)
    return Estimate(whiten(advantages_N) if options.whiten else advantages_N, returns_N)


def temporal_differences(rewards_N: Tensor, values_N: Tensor, lengths_R: Tensor, gamma: float) -> Tensor:
    """r_t + γ·V_{t+1} − V_t, with V = 0 after a row's last step."""
    deltas_N = rewards_N - values_N
    last_R = (lengths_R.cumsum(0) - 1)[lengths_R > 0]
    last_deltas_R = deltas_N[last_R]
    # Adds the next token's value everywhere, then restores each row's last token, which has no next one.
    deltas_N[:-1].add_(values_N[1:], alpha=gamma)
    return deltas_N.index_copy_(0, last_R, last_deltas_R)


def reinforce_plus_plus(batch: EstimatorBatch, options: ReinforcePlusPlusOptions) -> Estimate:
    """Wh(G), G_t = r_t + γ·G_{t+1}; returns = G. arXiv:2501.03262. Plain REINFORCE without whitening and with γ = 1."""
    returns_N = discounted_sums(batch.rewards_N, batch.lengths_R, options.gamma)
    return Estimate(whiten(returns_N) if options.whiten else returns_N, returns_N)


def remax(batch: EstimatorBatch, options: RemaxOptions) -> Estimate:
    """G_t − b_i, G_t = Σ_{s ≥ t} r_s and b_i the score of the policy's own greedy answer; returns = G.
    arXiv:2310.10505.
    """
    assert batch.baselines_R is not None
    returns_N = discounted_sums(batch.rewards_N, batch.lengths_R, 1.0)
    advantages_N = batch.spread(-batch.baselines_R.double()).add_(returns_N)
    return Estimate(advantages_N, returns_N)
