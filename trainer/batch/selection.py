"""Selects the groups, trajectories and tokens to train on and weights the trajectories. Pure functions; imports no
torch.

DAPO: arXiv:2503.14476. PF-PPO: arXiv:2409.06957. R: trajectories of the batch, whose groups are labelled by any
integers; G: those of one group; N: loss tokens. A trajectory's reward is its total, including rewards on its tokens. A
NaN or infinite reward raises an error wherever it would affect the result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from tandem.protos.errors import DataError
from tandem.trainer.algorithm import OverlongPenalty, PolicyFiltration

Floats = NDArray[np.float64]

POWER_EPSILON = 1e-8
"""Keeps every probability positive under `power`, and the weights defined when all rewards are 0."""


def zero_variance(rewards_G: Sequence[float] | Floats) -> bool:
    """True if the group has more than one reward (before any penalty) and all are equal. Its advantages are 0, so DAPO
    samples another group. Raises DataError if a reward is NaN or infinite.
    """
    rewards = check_finite(np.asarray(rewards_G, np.float64), "rewards")
    return len(rewards) > 1 and bool(rewards.min() == rewards.max())


def overlong_penalties(lengths_R: NDArray[np.int64], options: OverlongPenalty, *, max_tokens: int) -> Floats:
    """The penalties added to the rewards of answers of these lengths (sampled tokens): 0 up to max_tokens − buffer,
    from there linearly down to −factor at max_tokens, and −factor beyond (DAPO, eq. 13).
    """
    assert options.buffer_tokens <= max_tokens, "AlgorithmConfig.check_sampling refuses it"
    excess_R = np.maximum(lengths_R - (max_tokens - options.buffer_tokens), 0)
    if options.beyond == "flat":
        excess_R = np.minimum(excess_R, options.buffer_tokens)
    return -options.factor * excess_R / options.buffer_tokens


def filtration_weights(
    rewards_R: Floats, groups_R: NDArray[np.int64], options: PolicyFiltration, *, seed: int
) -> Floats:
    """How often each trajectory counts, (R,), in the loss and in its denominators.

    PF-PPO trains on μ, which picks the i-th best of a group's K answers with probability w_i:

        best_of_n    1, 0, …, 0
        best_random  1/2, then 1/(2(K − 1)) each
        best_worst   1/2, 0, …, 0, 1/2

    Equal rewards share the probability of their ranks. The weights are K·w_i, with mean 1 in every group. `power`:
    probability ∝ |reward|^power + 1e-8 over the whole batch, with mean weight 1 over the batch (the golden
    implementation's default). With `resample` the weights are counts drawn with these probabilities, deterministically
    for a given seed. Trajectories of weight 0 leave the loss; baselines and advantages are computed before, from all.

    Raises DataError if a reward is NaN or infinite.
    """
    assert rewards_R.ndim == 1 and rewards_R.shape == groups_R.shape, (rewards_R.shape, groups_R.shape)
    check_finite(rewards_R, "rewards")
    random = np.random.default_rng(seed)
    weights_R = np.ones(len(rewards_R))
    for rows in _groups(np.zeros_like(groups_R) if options.method == "power" else groups_R):
        probabilities = _probabilities(rewards_R[rows], options)
        expected = len(rows) * probabilities
        weights_R[rows] = random.multinomial(len(rows), probabilities) if options.resample else expected
    return weights_R


def _probabilities(rewards_G: Floats, options: PolicyFiltration) -> Floats:
    size = len(rewards_G)
    if options.method == "power":
        with np.errstate(over="ignore"):
            raw_G = np.abs(rewards_G) ** options.power + POWER_EPSILON
        return np.asarray(raw_G / check_finite(raw_G, "powers of rewards").sum(), np.float64)
    by_rank = np.zeros(size)
    if options.method == "best_of_n" or size == 1:
        by_rank[0] = 1.0
    elif options.method == "best_random":
        by_rank[:] = 0.5 / (size - 1)
        by_rank[0] = 0.5
    else:
        by_rank[[0, -1]] = 0.5
    _, ties, counts = np.unique(-rewards_G, return_inverse=True, return_counts=True)
    shared = np.add.reduceat(by_rank, np.cumsum(counts) - counts) / counts
    return np.asarray(shared[ties], np.float64)


def _groups(groups_R: NDArray[np.int64]) -> Iterator[NDArray[np.intp]]:
    order = np.argsort(groups_R, kind="stable")
    if len(order):
        yield from np.split(order, np.flatnonzero(np.diff(groups_R[order])) + 1)


def check_finite(values: Floats, name: str) -> Floats:
    """Returns the values. Raises DataError if one is NaN or infinite."""
    if num_bad := int((~np.isfinite(values)).sum()):
        raise DataError(f"{num_bad} of {len(values)} {name} are NaN or infinite: mend the scorer")
    return values
