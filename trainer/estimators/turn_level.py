"""Estimators whose step is a turn: the loss tokens that the policy sampled in a row, until given tokens follow.

K turns of the batch; those of a row follow one another. r_k is the sum of the rewards on a turn's tokens, and discounts
apply between turns. All tokens of a turn get the turn's advantage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tandem.trainer.batch.ragged import row_sums, spread
from tandem.trainer.estimators.group_relative import EPSILON
from tandem.trainer.estimators.groups import Groups, centred, deviations, whiten_rows
from tandem.trainer.estimators.inputs import Estimate, EstimatorBatch
from tandem.trainer.estimators.options import TurnGaeOptions, TurnGrpoOptions
from tandem.trainer.estimators.reward_to_go import temporal_differences
from tandem.trainer.estimators.scans import discounted_sums


@dataclass(frozen=True, slots=True)
class _Turns:
    """The first token, the number of tokens and the row of each turn, (K,), and the number of turns of each row."""

    firsts_K: Tensor
    lengths_K: Tensor
    rows_K: Tensor
    counts_R: Tensor

    @classmethod
    def of(cls, batch: EstimatorBatch) -> _Turns:
        turns_N, lengths_R = batch.turns_N, batch.lengths_R
        assert turns_N is not None
        ends_R = lengths_R.cumsum(0)
        begins_N = torch.ones_like(turns_N, dtype=torch.bool)
        begins_N[1:] = turns_N[1:] != turns_N[:-1]
        begins_N[(ends_R - lengths_R)[lengths_R > 0]] = True
        firsts_K = begins_N.nonzero()[:, 0]
        rows_K = torch.searchsorted(ends_R, firsts_K, right=True)
        return cls(
            firsts_K=firsts_K,
            lengths_K=firsts_K.diff(append=firsts_K.new_tensor([len(turns_N)])),
            rows_K=rows_K,
            counts_R=torch.bincount(rows_K, minlength=len(lengths_R)),
        )

    def rewards(self, batch: EstimatorBatch) -> Tensor:
        """r_k, (K,)."""
        return row_sums(batch.rewards_N, self.lengths_K)

    def spread(self, values_K: Tensor) -> Tensor:
        """Each turn's value on every token of that turn, (N,)."""
        return spread(values_K, self.lengths_K)


def turn_grpo(batch: EstimatorBatch, options: TurnGrpoOptions) -> Estimate:
    """(G_k − μ_k)/(σ_k + 1e-6), G_k = r_k + γ·G_{k+1}, over the rows of the group that have a turn k.

    Normalised returns of turns are GTPO's (arXiv:2511.14846). They are compared as the steps of GiGPO are
    (arXiv:2505.10978), with the turn's number in place of its anchor state. A turn that no other row of the group has
    gets 0: there is nothing to compare it with, and G_k itself would reward long episodes.
    """
    assert batch.turns_N is not None
    turns = _Turns.of(batch)
    returns_K = discounted_sums(turns.rewards(batch), turns.counts_R, options.gamma)
    numbers_K = batch.turns_N[turns.firsts_K]
    most = int(turns.counts_R.max()) if len(turns.counts_R) else 0
    groups = Groups.of(batch.groups.of_row_R[turns.rows_K] * most + numbers_K)
    is_alone_K = (groups.sizes_R == 1) & (batch.groups.sizes_R[turns.rows_K] > 1)
    centred_K = centred(returns_K, groups).masked_fill(is_alone_K, 0.0)
    return Estimate(turns.spread(centred_K / (deviations(centred_K, groups) + EPSILON)))


def turn_gae(batch: EstimatorBatch, options: TurnGaeOptions) -> Estimate:
    """Wh(Â), Δ_k = r_k + γ·V_{k+1} − V_k, Â_k = Δ_k + γλ·Â_{k+1}, V_k the critic's value before the first token of turn
    k (0 after the last turn). Turn-PPO, arXiv:2512.17008; a critic of whole utterances as in ArCHer, arXiv:2402.19446.

    Returns = Â_k + V_k on all tokens of the turn: what is still to come is the same for all of them.
    """
    assert batch.values_N is not None
    turns = _Turns.of(batch)
    values_K = batch.values_N.double()[turns.firsts_K]
    deltas_K = temporal_differences(turns.rewards(batch), values_K, turns.counts_R, options.gamma)
    advantages_K = discounted_sums(deltas_K, turns.counts_R, options.gamma * options.lam)
    returns_N = turns.spread(advantages_K + values_K)
    return Estimate(
        turns.spread(whiten_rows(advantages_K, turns.lengths_K) if options.whiten else advantages_K), returns_N
    )
