"""Inputs and results of advantage estimators. N loss tokens, flat, of R trajectories (see trainer/batch/ragged.py).

R counts the trajectories of the whole batch, not of one rank. The loss tokens of a trajectory's segments are
concatenated, and `groups_R` says which trajectories answer the same prompt. Groups may differ in size, and their rows
may be in any order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tandem.trainer.batch.ragged import row_sums, spread
from tandem.trainer.estimators.groups import Groups


@dataclass(frozen=True)
class EstimatorBatch:
    """The columns an estimator may read. Its options say which optional ones it needs."""

    rewards_N: Tensor
    """float64. The outcome's reward is on the row's last loss token, other rewards are on the tokens they were given
    for, and KL penalties are subtracted. A row without loss tokens therefore scores 0, and still counts in its group.
    """
    lengths_R: Tensor
    """int64 number of loss tokens of each row."""
    groups_R: Tensor
    """int64 label of each row's group; any integers."""
    baselines_R: Tensor | None = None
    """Reward of each row's greedy answer (ReMax)."""
    components_RC: Tensor | None = None
    """Each row's reward components, before they are added up (GDPO)."""
    values_N: Tensor | None = None
    """The critic's values (the estimators with a critic)."""
    logprobs_N: Tensor | None = None
    """Proximal log-probs (the token baselines)."""
    squared_probs_N: Tensor | None = None
    """Σ over the vocabulary of the squared proximal probability."""
    behavior_weights_N: Tensor | None = None
    """The factor the off-policy correction puts on each token's gradient, 0 for a rejected token; None means 1
    everywhere.
    """
    columns_N: Tensor | None = None
    """int64 position of each loss token in its row's response, counting tool tokens; increases within a row."""
    turns_N: Tensor | None = None
    """int64 number of each loss token's turn in its row, from 0 on and without gaps."""

    def __post_init__(self) -> None:
        num_tokens, num_rows = self.rewards_N.shape, self.lengths_R.shape
        assert self.rewards_N.ndim == 1 and self.rewards_N.dtype == torch.float64, self.rewards_N
        assert self.lengths_R.ndim == 1 and self.lengths_R.dtype == self.groups_R.dtype == torch.int64, self.lengths_R
        assert not len(self.lengths_R) or int(self.lengths_R.min()) >= 0, self.lengths_R
        assert int(self.lengths_R.sum()) == len(self.rewards_N), (self.lengths_R.sum(), num_tokens)
        for name, column in vars(self).items():
            shape = num_tokens if name.endswith("_N") else num_rows
            assert column is None or column.shape[:1] == shape, (name, column.shape)

    @cached_property
    def scores_R(self) -> Tensor:
        """Σ of each row's rewards."""
        return row_sums(self.rewards_N, self.lengths_R)

    @cached_property
    def groups(self) -> Groups:
        """The rows' groups, numbered 0 … P − 1."""
        return Groups.of(self.groups_R)

    def spread(self, values_R: Tensor) -> Tensor:
        """Each row's value on every token of that row, (N,)."""
        return spread(values_R, self.lengths_R)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Advantages for the loss and returns for the critic. float64, without gradient."""

    advantages_N: Tensor
    returns_N: Tensor | None = None
    """Reward-to-go, from the estimators that compute it."""
