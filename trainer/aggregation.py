"""Aggregation of token losses into the loss of an optimizer step.

Every mode is a weighted sum, Σ share · loss, in which a token's share depends only on its sequence. Shares are computed
from the counts of *all* sequences of the step, over every rank and micro-batch. A micro-batch adds its part of that
sum, so the step does not depend on how its sequences were split. Gradients of ranks are summed, not averaged.

With n_i the number of kept loss tokens of sequence i, N = Σ n_i, S the number of sequences with n_i > 0, and h the
length constant, a token's share is

| mode                      | share        |                                       |
|---------------------------|--------------|---------------------------------------|
| `token-mean`              | 1/N          | DAPO, arXiv:2503.14476                |
| `token-sum`               | 1            |                                       |
| `seq-mean-token-sum`      | 1/S          |                                       |
| `seq-mean-token-mean`     | 1/(S · n_i)  | GRPO, arXiv:2402.03300                |
| `seq-mean-token-sum-norm` | 1/(S · h)    | Dr.GRPO, arXiv:2503.20783             |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tandem.trainer.algorithm import Aggregation


def token_shares(
    counts: Sequence[int] | Tensor,
    aggregation: Aggregation,
    *,
    length_constant: float,
    num_tokens: int | None = None,
    num_sequences: float | None = None,
    multiplicities: Tensor | None = None,
) -> Tensor:
    """The share of one token of each of the R sequences, float64 (R,); 0 for a sequence without a loss token.

    `counts` is the number of loss tokens of each sequence, that is of all segments of a trajectory. If these are not
    all sequences of the step, `num_tokens` and `num_sequences` give N and S of all of them; a larger S counts sequences
    without a kept token as zeros. `length_constant` is h, above 0; only `seq-mean-token-sum-norm` reads it.
    `multiplicities`, (R,) and not negative, says how often each sequence counts, in the loss and in its denominators.
    """
    counts_R = torch.as_tensor(counts, dtype=torch.float64)
    assert counts_R.ndim == 1 and bool((counts_R >= 0).all()), "counts of loss tokens"
    assert length_constant > 0, length_constant
    counted_R = (counts_R > 0).double()
    if multiplicities is not None:
        assert multiplicities.shape == counts_R.shape and bool((multiplicities >= 0).all()), multiplicities
        counted_R = counted_R * multiplicities
    own_tokens, own_sequences = float(counts_R @ counted_R), float(counted_R.sum())
    tokens = own_tokens if num_tokens is None else float(num_tokens)
    sequences = own_sequences if num_sequences is None else float(num_sequences)
    assert tokens >= own_tokens and sequences >= own_sequences, (tokens, sequences)
    # Without loss tokens both totals are 0 and so is every share; dividing by 1 avoids NaN.
    tokens, sequences = tokens or 1.0, sequences or 1.0
    divisors: dict[Aggregation, float | Tensor] = {
        "token-mean": tokens,
        "token-sum": 1.0,
        "seq-mean-token-sum": sequences,
        "seq-mean-token-mean": sequences * counts_R.clamp(min=1.0),
        "seq-mean-token-sum-norm": sequences * length_constant,
    }
    return counted_R / divisors[aggregation]
